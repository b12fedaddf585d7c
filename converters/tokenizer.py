"""tokenizer.json -> GGUF vocabulary.

The pre-tokenizer is recognised by the expressions in tokenizer.json itself: hashing what a library
makes of a sample text changes its answer with the library's version. Entries up to the embedding's
rows are padded, the chat template is taken verbatim, and whether BOS is added is always said.

It knows nothing of tensors.
"""

from __future__ import annotations

from typing import Any

from ..errors import ConversionError
from .checkpoint import Checkpoint
from .plan import Value

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # llama.cpp's token types

# The Split expressions in order, for every pre-tokenizer that llama.cpp names and this converts.
_PRE = {
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
}


def vocabulary(checkpoint: Checkpoint, n_vocab: int) -> dict[str, Value]:
    """`tokenizer.*` metadata with `n_vocab` entries, the embedding's rows.

    Raises `ConversionError` for a tokenizer that llama.cpp could not reproduce.
    """
    tokenizer = checkpoint.json("tokenizer.json")
    if tokenizer is None:
        raise ConversionError(f"{checkpoint.folder / 'tokenizer.json'} is missing")
    config = checkpoint.json("tokenizer_config.json") or {}
    pre = recognise(tokenizer)
    tokens, types = _entries(tokenizer, n_vocab)
    kv: dict[str, Value] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": _merges(tokenizer),
    }
    ids = {token: i for i, token in enumerate(tokens)}
    for key, field in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
        id_ = _special(checkpoint, config, field, ids)
        if id_ is not None:
            kv[f"tokenizer.ggml.{key}_token_id"] = id_
    kv |= _more_ends(checkpoint, n_vocab)
    has_bos = "tokenizer.ggml.bos_token_id" in kv
    kv["tokenizer.ggml.add_bos_token"] = bool(config.get("add_bos_token", has_bos))
    kv["tokenizer.ggml.add_eos_token"] = bool(config.get("add_eos_token", False))
    return kv | _templates(checkpoint, config)


def recognise(tokenizer: dict[str, Any]) -> str:
    """llama.cpp's name of the pre-tokenizer. Raises `ConversionError` when it has none for it."""
    model, pre = tokenizer.get("model") or {}, tokenizer.get("pre_tokenizer") or {}
    if model.get("type") != "BPE":
        raise ConversionError(
            f"tokenizer.json: the model is {model.get('type')!r}, but only BPE is known"
        )
    if tokenizer.get("normalizer") not in (None, {"type": "Sequence", "normalizers": []}):
        raise ConversionError("tokenizer.json has a normalizer, which the run time does not apply")
    steps = pre.get("pretokenizers", [pre])
    splits = tuple((s.get("pattern") or {}).get("Regex") for s in steps if s.get("type") == "Split")
    if splits not in _PRE or steps[-1].get("type") != "ByteLevel":
        raise ConversionError(
            f"tokenizer.json: the pre-tokenizer with the expressions {list(splits)} is unknown"
        )
    return _PRE[splits]


def _entries(tokenizer: dict[str, Any], n_vocab: int) -> tuple[list[str], list[int]]:
    known: dict[int, tuple[str, int]] = {
        int(id_): (token, _NORMAL) for token, id_ in tokenizer["model"]["vocab"].items()
    }
    for added in tokenizer.get("added_tokens") or []:
        text = added["content"]
        # DeepSeek marks its role tokens "not special" though they never are text; llama.cpp's own
        # converter goes by the brackets, and so do the files in circulation.
        control = added.get("special") or (text.startswith("<｜") and text.endswith("｜>"))
        known[int(added["id"])] = (text, _CONTROL if control else _USER_DEFINED)
    largest = max(known, default=-1)
    if largest >= n_vocab:
        raise ConversionError(
            f"tokenizer.json has the token id {largest}, but the embedding has {n_vocab} rows"
        )
    entries = [known.get(i, (f"[PAD{i}]", _UNUSED)) for i in range(n_vocab)]
    return [token for token, _ in entries], [type_ for _, type_ in entries]


def _merges(tokenizer: dict[str, Any]) -> list[str]:
    merges = tokenizer["model"]["merges"]
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]


def _more_ends(checkpoint: Checkpoint, n_vocab: int) -> dict[str, Value]:
    """config.json may list several tokens that end an answer; the run time has two more keys."""
    ids = checkpoint.config.get("eos_token_id")
    ends = ids[1:] if isinstance(ids, list) else []
    if len(ends) > 2 or not all(isinstance(id_, int) and 0 <= id_ < n_vocab for id_ in ends):
        raise ConversionError(
            f"config.json: eos_token_id is {ids!r}, but must be up to 3 ids below {n_vocab}"
        )
    keys = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    return dict(zip(keys, ends, strict=False))


def _special(
    checkpoint: Checkpoint, config: dict[str, Any], field: str, ids: dict[str, int]
) -> int | None:
    """The id of a special token: by its text in tokenizer_config.json, else from config.json."""
    token = config.get(f"{field}_token")
    text = token.get("content") if isinstance(token, dict) else token
    if text is None:
        id_ = checkpoint.config.get(f"{field}_token_id")
        id_ = id_[0] if isinstance(id_, list) and id_ else id_
        return id_ if isinstance(id_, int) and 0 <= id_ < len(ids) else None
    if text not in ids:
        raise ConversionError(
            f"tokenizer_config.json: {field}_token {text!r} is not in the vocabulary"
        )
    return ids[text]


def _templates(checkpoint: Checkpoint, config: dict[str, Any]) -> dict[str, Value]:
    key, file = "tokenizer.chat_template", checkpoint.folder / "chat_template.jinja"
    template = file.read_text(encoding="utf-8") if file.exists() else config.get("chat_template")
    if template is None:
        return {}
    if isinstance(template, str):
        return {key: template}
    named = {t["name"]: t["template"] for t in template}
    return {key if name == "default" else f"{key}.{name}": text for name, text in named.items()}
