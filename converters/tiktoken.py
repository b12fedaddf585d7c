"""Kimi's vocabulary: tiktoken.model, lines of a token in base64 and its rank -> tokens, merges.

How text is split stands in the release's tokenization_kimi.py only, which is read as text and never
run: llama.cpp's `kimi-k2` is right for its expressions and no others. It needs no tiktoken.
"""

from __future__ import annotations

import ast
import base64
import binascii
import logging
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ConversionError
from .byte_level import spell

logger = logging.getLogger(__name__)

FILE = "tiktoken.model"
CODE = "tokenization_kimi.py"

_WORD = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_ENDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
EXPRESSIONS = (
    r"[\p{Han}]+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_WORD[0]}*{_WORD[1]}+{_ENDS}",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_WORD[0]}+{_WORD[1]}*{_ENDS}",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)
"""The release's, in order: Han runs, then words as o200k splits them but without Han."""

_N_RESERVED = 256 + 2  # ids after the ranks that are special tokens, named or not


class RankedVocabulary(NamedTuple):
    """`tokens` by rank and `merges`, spelled byte by byte; `special` texts by id."""

    tokens: list[str]
    merges: list[str]
    special: dict[int, str]


def read(folder: Path, config: Mapping[str, Any]) -> RankedVocabulary:
    """The vocabulary in `folder`; `config` is tokenizer_config.json.

    Raises `ConversionError` for files that are missing, malformed, or not Kimi's.
    """
    _check_expressions(folder / CODE)
    ranks = _ranks(folder / FILE)
    special = _special(config, len(ranks))
    return RankedVocabulary([spell(token) for token in ranks], _merges(ranks), special)


def _check_expressions(path: Path) -> None:
    if not path.exists():
        raise ConversionError(
            f"{path} is missing: it defines how text is split, and {FILE} does not"
        )
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as error:
        raise ConversionError(f"{path} is not Python: {error}") from None
    # The release joins a list of them; siblings stay together in a walk by levels.
    texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)]
    if "|".join(EXPRESSIONS) not in "|".join(t for t in texts if isinstance(t, str)):
        raise ConversionError(f"{path}: its split expressions differ from Kimi-K2's")


def _ranks(path: Path) -> dict[bytes, int]:
    """Rank of each token, in order of the ranks, which are the ids."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line:
            continue
        token, rank = _line(line, f"{path}, line {number}")
        if token in ranks:
            raise ConversionError(f"{path}, line {number}: the token {token!r} occurs twice")
        ranks[token] = rank
    ordered = dict(sorted(ranks.items(), key=lambda item: item[1]))
    for expected, (token, rank) in enumerate(ordered.items()):
        if rank != expected:
            raise ConversionError(
                f"{path}: {token!r} has rank {rank}, but the next rank after "
                f"{expected - 1} must be {expected}"
            )
    missing = [byte for byte in range(256) if bytes([byte]) not in ordered]
    if missing:
        raise ConversionError(f"{path}: the single byte 0x{missing[0]:02x} is not a token")
    return ordered


def _line(line: bytes, place: str) -> tuple[bytes, int]:
    try:
        token, rank = line.split()
        raw = base64.b64decode(token, validate=True)
        number = int(rank)
    except (ValueError, binascii.Error):
        raise ConversionError(
            f"{place}: {line[:60].decode(errors='replace')!r} is not a token in base64 and its rank"
        ) from None
    if not raw:
        raise ConversionError(f"{place}: the token is empty")
    return raw, number


def _special(config: Mapping[str, Any], n_ranks: int) -> dict[int, str]:
    """The 258 ids after the ranks, as the release's tokenizer names those that have no name."""
    special = {i: f"<|reserved_token_{i}|>" for i in range(n_ranks, n_ranks + _N_RESERVED)}
    named = config.get("added_tokens_decoder")
    if not isinstance(named, dict):
        raise ConversionError("tokenizer_config.json has no added_tokens_decoder")
    for key, entry in named.items():
        text = entry.get("content") if isinstance(entry, dict) else None
        id_ = int(key) if key.isdecimal() else -1
        if id_ < n_ranks or not isinstance(text, str):
            raise ConversionError(
                f"tokenizer_config.json: added_tokens_decoder has {key!r}: {text!r}, but must map "
                f"ids from {n_ranks} on to texts"
            )
        special[id_] = text
    return special


def _merges(ranks: Mapping[bytes, int]) -> list[str]:
    """The pair that makes each token, in order of ranks.

    tiktoken keeps no merges: it joins whatever neighbours make the token of lowest rank. A span
    that becomes one token was not merged across its ends before, so inside it went as it goes
    alone: the last two parts of a token alone, under lower ranks, are its only pair.
    """
    merges, whole = [], []
    for token, rank in ranks.items():
        if len(token) == 1:
            continue
        parts = _parts(token, ranks, rank)
        if len(parts) == 2:
            merges.append(" ".join(spell(part) for part in parts))
        else:
            whole.append(token)
    if whole:
        # tiktoken finds them only where a piece of text is exactly that token.
        logger.warning(
            "%s: %d tokens cannot be merged from smaller ones (the first is %r): "
            "llama.cpp will not produce them", FILE, len(whole), whole[0],
        )  # fmt: skip
    return merges


def _parts(token: bytes, ranks: Mapping[bytes, int], limit: int) -> list[bytes]:
    parts = [token[i : i + 1] for i in range(len(token))]
    while True:
        ranked = [(ranks.get(a + b, limit), i) for i, (a, b) in enumerate(pairwise(parts))]
        best, i = min(ranked, default=(limit, 0))
        if best >= limit:
            return parts
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
