"""A sequence as bytes: what the caches hold of it, and enough to refuse a wrong or damaged file.

    8 bytes   magic and version
    32 bytes  SHA-256 of everything behind it
    4 bytes   length of the header, little-endian
    header    JSON: {"fingerprint", "tokens", "parts": [[name, n_bytes], ...]}
    parts     one after the other

Pure: knows no cache and no model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gguf_mtp.errors import SavedStateError

MAGIC = b"gmtpseq\x01"
_HEAD = len(MAGIC) + 32 + 4


class SavedSequence(NamedTuple):
    """`tokens` are certain; `parts` hold each cache's own bytes ("target", and each drafter by its
    name)."""

    tokens: list[int]
    parts: dict[str, bytes]


def pack(fingerprint: str, tokens: Sequence[int], parts: Mapping[str, bytes]) -> bytes:
    """The bytes of a sequence; `fingerprint` names the model and the cache's kind."""
    sizes = [[name, len(data)] for name, data in parts.items()]
    header = json.dumps({"fingerprint": fingerprint, "tokens": list(tokens), "parts": sizes})
    raw = header.encode()
    body = b"".join((len(raw).to_bytes(4, "little"), raw, *parts.values()))
    return MAGIC + hashlib.sha256(body).digest() + body


def unpack(data: bytes, fingerprint: str) -> SavedSequence:
    """The reverse. Raises `SavedStateError`: damaged, of another version, or of another model."""
    if data[: len(MAGIC) - 1] != MAGIC[:-1]:
        raise SavedStateError("this is not a saved sequence")
    if data[: len(MAGIC)] != MAGIC:
        raise SavedStateError("the sequence was saved by another version of gguf-mtp")
    body = data[len(MAGIC) + 32 :]
    if hashlib.sha256(body).digest() != data[len(MAGIC) : len(MAGIC) + 32]:
        raise SavedStateError("the saved sequence is damaged: its checksum is wrong")
    end = 4 + int.from_bytes(body[:4], "little")
    header = _header(body[4:end])
    if header.fingerprint != fingerprint:
        raise SavedStateError(
            "the sequence was saved with another model or other settings: "
            f"{header.fingerprint}, not {fingerprint}"
        )
    parts = {}
    for name, size in header.parts:
        parts[name] = body[end : end + size]
        end += size
    if end != len(body) or "target" not in parts:
        raise SavedStateError("the saved sequence does not hold what its header says")
    return SavedSequence(header.tokens, parts)


class _Header(NamedTuple):
    fingerprint: str
    tokens: list[int]
    parts: list[tuple[str, int]]


def _header(raw: bytes) -> _Header:
    """The header, whoever wrote it: a checksum is no signature."""
    try:
        found: Any = json.loads(raw)
        header = _Header(found["fingerprint"], found["tokens"], found["parts"])
        is_sound = (
            isinstance(header.fingerprint, str)
            and isinstance(header.tokens, list)
            and all(type(token) is int and 0 <= token < 1 << 31 for token in header.tokens)
            and all(isinstance(name, str) and type(n) is int and n >= 0 for name, n in header.parts)
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        is_sound = False
    if not is_sound:
        raise SavedStateError("the saved sequence has a header that gguf-mtp does not write")
    return header
