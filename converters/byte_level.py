"""GPT-2's spelling of bytes as printable characters, in which BPE vocabularies are written."""

from __future__ import annotations

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = tuple(byte for byte in range(256) if byte not in _PRINTABLE)
# The bytes without a printable character of their own get those from U+0100 on, in order.
_SPELLING = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(0x100 + i) for i, byte in enumerate(_OTHERS)
}
_BYTES = {character: byte for byte, character in _SPELLING.items()}


def spell(raw: bytes) -> str:
    """One character for each byte."""
    return "".join(_SPELLING[byte] for byte in raw)


def as_bytes(token: str) -> bytes:
    """The inverse of `spell`; characters that stand for no byte are left out."""
    return bytes(_BYTES[character] for character in token if character in _BYTES)
