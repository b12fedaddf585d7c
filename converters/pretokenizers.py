"""Which of llama.cpp's pre-tokenizers is the one of a tokenizer.json.

It is recognised by the expressions in the file itself: hashing what a library makes of a sample
text changes its answer with the library's version. It knows nothing of GGUF.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from ..errors import ConversionError
from .byte_level import as_bytes

# Cased letters as DeepSeek-LLM and V2-Lite list them. Escaped, because three ends of ranges
# (\u1f7d, \u1fd3, \u1fdb) and some letters would change if an editor normalised this file.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd"
    "\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d"
    "\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b"
    "\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787"
    "\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_LLM = (
    "[\r\n]",
    rf"\s?[{_CASED}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    "Digits",
)

KNOWN: dict[tuple[str, ...], str] = {
    (
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+"
        "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*"
        "|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    ): "deepseek-v3",
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ): "glm4",
    _DEEPSEEK_LLM: "deepseek-llm",
}
"""Names by every step before the last one, which is ByteLevel."""


def recognise(tokenizer: dict[str, Any]) -> str:
    """llama.cpp's name of the pre-tokenizer. Raises `ConversionError` when it has none for it."""
    model, pre = tokenizer.get("model") or {}, tokenizer.get("pre_tokenizer") or {}
    if model.get("type") != "BPE":
        raise ConversionError(
            f"tokenizer.json: the model is {model.get('type')!r}, but only BPE is supported"
        )
    if tokenizer.get("normalizer") not in (None, {"type": "Sequence", "normalizers": []}):
        raise ConversionError("tokenizer.json has a normalizer, which llama.cpp does not apply")
    *splits, last = (_step(step) for step in pre.get("pretokenizers") or [pre])
    name = KNOWN.get(tuple(splits))
    if name is None or last != "ByteLevel":
        raise ConversionError(
            f"tokenizer.json: the pre-tokenizer with steps {[*splits, last]} is not supported"
        )
    if name == "deepseek-llm":
        _refuse_numbers(model["vocab"])
    return name


def _step(step: dict[str, Any]) -> str:
    """A Split by its expression; any other step by its name, with what it does otherwise."""
    type_ = str(step.get("type"))
    if type_ == "Split":
        return str((step.get("pattern") or {}).get("Regex"))
    if type_ == "Digits" and not step.get("individual_digits"):
        return "Digits(individual_digits=false)"
    if type_ == "ByteLevel" and step.get("use_regex", True):
        return "ByteLevel(use_regex=true)"
    return type_


def _refuse_numbers(tokens: Iterable[str]) -> None:
    """The file splits digits one by one, llama.cpp's `deepseek-llm` in runs: the same ids only
    while no token could be made of two of them."""
    for token in tokens:
        text = as_bytes(token).decode("utf-8", errors="ignore")
        digits = [unicodedata.category(character).startswith("N") for character in text]
        if any(a and b for a, b in pairwise(digits)):
            raise ConversionError(
                f"tokenizer.json: the token {text!r} holds several digits, which its own "
                "pre-tokenizer keeps apart and llama.cpp's deepseek-llm does not"
            )
