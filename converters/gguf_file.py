"""A GGUF header as bytes: metadata first, then one line per tensor, then the data's places.

Everything is known before the first weight is read, so the header is written once and tensors go
straight to their offsets. Format: the GGUF specification, version 3, little-endian.

It knows nothing of what the keys or tensors mean.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from .plan import OutputTensor, Value

ALIGNMENT = 32


class TypedTensor(NamedTuple):
    """An output tensor with its ggml type, its size, and its offset in the file's data section."""

    tensor: OutputTensor
    type: GGMLQuantizationType
    n_bytes: int
    offset: int


def row_bytes(type_: GGMLQuantizationType, n: int) -> int:
    """Bytes of a row of `n` weights; `n` is a multiple of the type's block."""
    block, size = GGML_QUANT_SIZES[type_]
    return n // block * size


def place(
    tensors: Sequence[OutputTensor], types: Sequence[GGMLQuantizationType]
) -> list[TypedTensor]:
    """Give each tensor its aligned offset, in order."""
    placed, offset = [], 0
    for tensor, type_ in zip(tensors, types, strict=True):
        n = tensor.n_rows * row_bytes(type_, tensor.n_per_row)
        placed.append(TypedTensor(tensor, type_, n, offset))
        offset += pad(n)
    return placed


def pad(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT


def header(kv: Mapping[str, Value], tensors: Sequence[TypedTensor]) -> bytes:
    """All bytes before the data section, padding included."""
    out = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(kv)))
    for key, value in kv.items():
        out += _string(key) + _value(value)
    for placed in tensors:
        shape = placed.tensor.shape[::-1]  # GGUF lists the innermost dimension first
        out += _string(placed.tensor.name)
        out += struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, placed.type, placed.offset)
    return bytes(out.ljust(pad(len(out)), b"\0"))


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Value) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", GGUFValueType.BOOL, value)
        case int():
            return struct.pack("<II", GGUFValueType.UINT32, value)
        case float():
            return struct.pack("<If", GGUFValueType.FLOAT32, value)
        case str():
            return struct.pack("<I", GGUFValueType.STRING) + _string(value)
        case _:
            return struct.pack("<I", GGUFValueType.ARRAY) + _array(value)


def _array(values: Sequence[str] | Sequence[int]) -> bytes:
    if values and isinstance(values[0], str):
        head = struct.pack("<IQ", GGUFValueType.STRING, len(values))
        return head + b"".join(_string(str(v)) for v in values)
    return struct.pack(f"<IQ{len(values)}i", GGUFValueType.INT32, len(values), *values)
