"""Mutants of a GGUF file: one part changed at a time, the rest as sound as it can be.

The writer lays tensors out anew, so that a changed shape or type comes with as many bytes as it
asks for and the file looks whole.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from gguf_mtp.gguf.ggml_types import TENSOR_TYPES

SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
F32, STRING, ARRAY = 6, 8, 9
MOST_BYTES = 32 << 20
"""Larger mutants are left out."""

FLOATS = (math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-45, 3e38)
COUNTS = (0, 1, 2, 3, 5, 7, 16, 64, 256, 513, 1025, (1 << 31) - 1)
TEXTS = (b"", b"x", b"\xff", b"none", b"llama", b"bert", b"t5", b"rwkv", b"yarn", b"longrope")
TEMPLATES = (
    b"{{", b"{{ messages[5].x.y }}", b"{{ 'a' * 3000000000 }}", b"{{ 10 ** (10 ** 9) }}",
    b"{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", b"{{ ''.__class__ }}",
    b"{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
)  # fmt: skip


class Tensor(NamedTuple):
    name: bytes
    shape: list[int]
    type: int
    data: bytes


@dataclass
class RawGguf:
    """`kv`: key -> (type number, value); an array's value is (type number, items)."""

    kv: dict[bytes, tuple[int, Any]] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)

    def copy(self) -> RawGguf:
        return RawGguf(dict(self.kv), list(self.tensors))

    def write(self, path: Path) -> bool:
        """False, and nothing written, for a mutant that is too large."""
        alignment = self.kv.get(b"general.alignment", (4, 32))[1] or 32
        datas = [_fitting(tensor) for tensor in self.tensors]
        if any(data is None for data in datas):
            return False
        out = [b"GGUF", struct.pack("<IQQ", 3, len(self.tensors), len(self.kv))]
        for key, (kind, value) in self.kv.items():
            out += [_text(key), struct.pack("<I", kind), _value(kind, value)]
        offset = 0
        for tensor, data in zip(self.tensors, datas, strict=True):
            n = len(tensor.shape)
            out.append(_text(tensor.name) + struct.pack(f"<I{n}Q", n, *tensor.shape))
            out.append(struct.pack("<IQ", tensor.type, offset))
            offset += -(-len(data or b"") // alignment) * alignment
        head = b"".join(out)
        parts = [head, bytes(-len(head) % alignment)]
        for data in datas:
            parts += [data or b"", bytes(-len(data or b"") % alignment)]
        path.write_bytes(b"".join(parts))
        return True


def parse(raw: bytes) -> RawGguf:
    at = 24

    def take(form: str) -> Any:
        nonlocal at
        (value,) = struct.unpack_from("<" + form, raw, at)
        at += struct.calcsize("<" + form)
        return value

    def text() -> bytes:
        nonlocal at
        n = take("Q")
        at += n
        return raw[at - n : at]

    def value(kind: int) -> Any:
        if kind == STRING:
            return text()
        if kind == ARRAY:
            of, n = take("I"), take("Q")
            return of, [value(of) for _ in range(n)]
        return take(SCALARS[kind])

    n_tensors, n_kv = struct.unpack_from("<QQ", raw, 8)
    gguf = RawGguf()
    for _ in range(n_kv):
        key, kind = text(), take("I")
        gguf.kv[key] = (kind, value(kind))
    entries = []
    for _ in range(n_tensors):
        name = text()
        shape = [take("Q") for _ in range(take("I"))]
        entries.append((name, shape, take("I"), take("Q")))
    start = at + -at % 32
    for name, shape, kind, offset in entries:
        begin = start + offset
        gguf.tensors.append(Tensor(name, shape, kind, raw[begin : begin + _n_bytes(shape, kind)]))
    return gguf


def mutants(sound: RawGguf, random: Random) -> Iterator[tuple[str, RawGguf]]:
    """Endless: what was changed, and the file."""
    while True:
        gguf = sound.copy()
        what = random.choice((_change_value, _change_value, _drop_key, _change_tensor))(
            gguf, random
        )
        yield what, gguf


def _change_value(gguf: RawGguf, random: Random) -> str:
    key = random.choice(sorted(gguf.kv))
    kind, old = gguf.kv[key]
    new: Any
    if key == b"tokenizer.chat_template":
        new = random.choice(TEMPLATES)
    elif kind == STRING:
        new = random.choice(TEXTS)
    elif kind == ARRAY:
        of, items = old
        cut = random.randrange(len(items) + 1)
        new = (of, random.choice((items[:cut], items + items[:cut], items[:1] * len(items))))
    elif kind == F32:
        new = random.choice(FLOATS)
    elif SCALARS[kind] == "?":
        new = not old
    else:
        limit = 1 << (8 * struct.calcsize(SCALARS[kind]) - 1)
        new = random.choice((*COUNTS, old + 1, max(old - 1, 0), old * 2)) % limit
    gguf.kv[key] = (kind, new)
    return f"{key.decode()} = {new!r:.80}"


def _drop_key(gguf: RawGguf, random: Random) -> str:
    key = random.choice(sorted(gguf.kv))
    del gguf.kv[key]
    return f"without {key.decode()}"


def _change_tensor(gguf: RawGguf, random: Random) -> str:
    index = random.randrange(len(gguf.tensors))
    old, new = gguf.tensors[index], None
    how = random.randrange(4)
    if how == 0:
        new = old._replace(type=random.choice(sorted(TENSOR_TYPES)))
    elif how == 1:
        shape = list(old.shape)
        shape[random.randrange(len(shape))] = random.choice((0, 1, 2, 33, 256))
        new = old._replace(shape=shape)
    elif how == 2:
        pattern = random.choice((b"\0\0\xc0\x7f", b"\xff\xff\xff\xff", b"\0\0\x80\x7f"))
        new = old._replace(data=pattern * (len(old.data) // 4))
    gguf.tensors[index : index + 1] = [] if new is None else [new]
    return f"{old.name.decode()}: {'dropped' if new is None else (new.shape, new.type)}"


def _n_bytes(shape: list[int], kind: int) -> int:
    of = TENSOR_TYPES[kind]
    return math.prod(shape) // of.block * of.n_bytes


def _fitting(tensor: Tensor) -> bytes | None:
    """The tensor's data, repeated or cut to what its shape and type ask for."""
    n_bytes = _n_bytes(tensor.shape, tensor.type)
    if n_bytes > MOST_BYTES:
        return None
    data = tensor.data or b"\0"
    return (data * (n_bytes // len(data) + 1))[:n_bytes]


def _text(raw: bytes) -> bytes:
    return struct.pack("<Q", len(raw)) + raw


def _value(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return _text(value)
    if kind == ARRAY:
        of, items = value
        return struct.pack("<IQ", of, len(items)) + b"".join(_value(of, item) for item in items)
    return struct.pack("<" + SCALARS[kind], value)
