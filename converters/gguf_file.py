"""A GGUF header as bytes: metadata first, then one line per tensor, then the data's places.

Everything is known before the first weight is read, so the header is written once and tensors go
straight to their offsets. Format: the GGUF specification, version 3, little-endian.

It knows nothing of what the keys or tensors mean.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from .tensors import OutputTensor, Value

ALIGNMENT = 32


class HeaderEntry(NamedTuple):
    """A tensor's line in the header. `shape` is outermost first, `type` ggml's number, `offset`
    counts from the start of the data section."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


class TypedTensor(NamedTuple):
    """An output tensor with its ggml type, its size, and its offset in the file's data section."""

    tensor: OutputTensor
    type: GGMLQuantizationType
    n_bytes: int
    offset: int

    @property
    def entry(self) -> HeaderEntry:
        return HeaderEntry(self.tensor.name, self.tensor.shape, self.type, self.offset)


def row_bytes(type_: GGMLQuantizationType, n: int) -> int:
    """Bytes of a row of `n` weights; `n` is a multiple of the type's block."""
    block, size = GGML_QUANT_SIZES[type_]
    return n // block * size


def size(tensors: Sequence[OutputTensor], types: Sequence[GGMLQuantizationType]) -> list[int]:
    """Bytes of each tensor."""
    return [
        t.n_rows * row_bytes(type_, t.n_per_row) for t, type_ in zip(tensors, types, strict=True)
    ]


def offsets(sizes: Sequence[int]) -> list[int]:
    """The aligned offset of each tensor, in order."""
    return [0, *accumulate(map(pad, sizes))][:-1]


def pad(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT


def header(kv: Mapping[str, Value | bytes], tensors: Sequence[HeaderEntry]) -> bytes:
    """All bytes before the data section, padding included. A value of bytes is encoded already."""
    out = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(kv)))
    for key, value in kv.items():
        out += _string(key) + (value if isinstance(value, bytes) else _value(value))
    for entry in tensors:
        shape = entry.shape[::-1]  # GGUF lists the innermost dimension first
        out += _string(entry.name)
        out += struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, entry.type, entry.offset)
    return bytes(out.ljust(pad(len(out)), b"\0"))


def split_keys(i: int, n: int, n_tensors: int) -> dict[str, Value | bytes]:
    """What shard `i` of `n` says of itself, in the types that llama.cpp reads: none when alone."""
    if n == 1:
        return {}
    return {
        "split.no": struct.pack("<IH", GGUFValueType.UINT16, i),
        "split.count": struct.pack("<IH", GGUFValueType.UINT16, n),
        "split.tensors.count": struct.pack("<Ii", GGUFValueType.INT32, n_tensors),
    }


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


def _array(values: Sequence[str] | Sequence[int] | Sequence[float]) -> bytes:
    if values and isinstance(values[0], str):
        head = struct.pack("<IQ", GGUFValueType.STRING, len(values))
        return head + b"".join(_string(str(v)) for v in values)
    if values and isinstance(values[0], float):
        return struct.pack(f"<IQ{len(values)}f", GGUFValueType.FLOAT32, len(values), *values)
    return struct.pack(f"<IQ{len(values)}i", GGUFValueType.INT32, len(values), *values)
