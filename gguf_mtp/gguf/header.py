"""GGUF headers: bytes on disk -> metadata values and tensor places. It never reads weights.

Every count, length and offset is checked against the file's size before it is believed, with the
rules of the pinned llama.cpp (`ggml/src/gguf.cpp`), so that a damaged file ends in a sentence here
instead of a bare refusal there. It does not know what the values mean: that is `model_facts`.
The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import os
import re
import stat
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gguf_mtp.errors import LoadFailed
from gguf_mtp.gguf.cursor import MAX_KEPT, Cursor
from gguf_mtp.gguf.ggml_types import TENSOR_TYPES
from gguf_mtp.types import TensorInfo

__all__ = ["Header", "raw_metadata", "read_header", "shard_paths"]

# GGUF value type number -> struct format; 8 is a string, 9 an array.
SCALARS: Mapping[int, str] = dict(enumerate("BbHhIif?", start=0)) | {10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
U16, U32 = 2, 4

MAX_DIMS, MAX_NAME = 4, 63
VERSIONS = (2, 3)

# How other files begin that people try to load.
FOREIGN = {
    b"version https://git-lfs": "a Git LFS pointer: fetch the real file with `git lfs pull`",
    b"PK\x03\x04": "a zip archive, perhaps a PyTorch checkpoint",
    b"lmgg": "an old GGML file from before GGUF",
    b"tjgg": "an old GGML file from before GGUF",
    b"<": "a web page: the download went wrong",
}


class Header(NamedTuple):
    """The header of a model, all its shards together.

    `kv`: metadata of the first shard; of arrays longer than 1,024 only the length (an int).
    `tensors`: in file order; `offset` counts bytes from the start of the tensor's `file`.
    """

    kv: dict[str, Any]
    tensors: tuple[TensorInfo, ...]


class _Shard(NamedTuple):
    kv: dict[str, Any]
    kinds: dict[str, int]
    tensors: list[TensorInfo]


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read the header of a GGUF file and of the shards it names.

    Raises `LoadFailed` when a file is missing, unreadable, not a GGUF, of another version or byte
    order, damaged or cut short.
    """
    first = _read_shard(Path(path))
    n_shards = first.kv.get("split.count", 1)
    if "split.count" in first.kv and first.kinds["split.count"] != U16:
        raise LoadFailed(f"{path} is damaged: split.count is not a 16-bit number")
    tensors = list(first.tensors)
    if n_shards > 1:
        for index, shard_path in enumerate(shard_paths(path, n_shards)):
            shard = _read_shard(shard_path) if index else first
            if shard.kinds.get("split.no") != U16 or shard.kv["split.no"] != index:
                raise LoadFailed(
                    f"{shard_path} should be shard {index + 1} of {n_shards}, but its header says "
                    f"{_shard_number(shard)}"
                )
            tensors += shard.tensors if index else []
        expected = first.kv.get("split.tensors.count", len(tensors))
        if len(tensors) != expected:
            raise LoadFailed(
                f"{path} is damaged: its {n_shards} shards hold {len(tensors)} tensors, "
                f"but its header says {expected}"
            )
    _refuse_twins(tensors, str(path))
    return Header(first.kv, tuple(tensors))


def raw_metadata(path: str | os.PathLike[str]) -> dict[str, bytes]:
    """Each metadata value as the file holds it, type and all; of a split model, the first shard's.

    Raises `LoadFailed` as `read_header` does.
    """
    path = Path(path)
    spans: dict[str, slice] = {}
    try:
        with path.open("rb", buffering=1 << 20) as file:
            cursor = Cursor(file, path)
            _check_magic(cursor)
            _, n_kv = cursor.number("<Q"), cursor.number("<Q")
            for _ in range(n_kv):
                key, begin = cursor.text(), cursor.tell()
                _value(cursor, cursor.number("<I"), key)
                spans[key] = slice(begin, cursor.tell())
            file.seek(0)
            raw = file.read(cursor.tell())
    except OSError as error:
        raise LoadFailed(f"cannot read {path}: {error.strerror}") from error
    return {key: raw[span] for key, span in spans.items()}


def shard_paths(path: str | os.PathLike[str], n_shards: int) -> list[Path]:
    """The files of a split model, `path` being the first (`NAME-00001-of-0000N.gguf`).

    Raises `LoadFailed` when the name is not of that pattern, or is a later shard's.
    """
    path = Path(path)
    match = re.fullmatch(r"(.+)-(\d{5})-of-(\d{5})\.gguf", path.name)
    if not match or int(match[3]) != n_shards:
        raise LoadFailed(
            f"{path} is one of {n_shards} shards, but is not named "
            f"NAME-00001-of-{n_shards:05d}.gguf; llama.cpp finds the others by that name"
        )
    shards = [
        path.with_name(f"{match[1]}-{number:05d}-of-{n_shards:05d}.gguf")
        for number in range(1, n_shards + 1)
    ]
    if path != shards[0]:
        raise LoadFailed(f"{path} is not the first shard; load {shards[0].name} instead")
    return shards


def _shard_number(shard: _Shard) -> str:
    number = shard.kv.get("split.no")
    return f"shard {number + 1}" if isinstance(number, int) else "nothing"


def _refuse_twins(tensors: Sequence[TensorInfo], path: str) -> None:
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            raise LoadFailed(f"{path} is damaged: two tensors are named {tensor.name!r}")
        seen.add(tensor.name)


# -- one file ----------------------------------------------------------------------------------


def _read_shard(path: Path) -> _Shard:
    try:
        # A pipe or a device would block or never end.
        if not stat.S_ISREG(path.stat().st_mode):
            kind = "a folder" if path.is_dir() else "not a regular file"
            hint = ""
            if (path / "config.json").is_file():
                hint = f"; `gguf-mtp convert {path}` makes one of a checkpoint"
            raise LoadFailed(f"{path} is {kind}, but must be a GGUF file{hint}")
        with path.open("rb", buffering=1 << 20) as file:
            return _parse(Cursor(file, path))
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise LoadFailed(f"cannot read {path}: {why}") from error


def _parse(cursor: Cursor) -> _Shard:
    _check_magic(cursor)
    n_tensors, n_kv = cursor.number("<Q"), cursor.number("<Q")
    # The smallest entries: a key of one byte with a one-byte value; a tensor without a name.
    cursor.expect(n_kv, 14, "metadata values")
    cursor.expect(n_tensors, 24, "tensors")
    kv: dict[str, Any] = {}
    kinds: dict[str, int] = {}
    for _ in range(n_kv):
        key = cursor.text()
        if not key or key in kv:
            raise cursor.damaged(f"metadata key {key!r} appears twice" if key else "a key is empty")
        kinds[key] = kind = cursor.number("<I")
        kv[key] = _value(cursor, kind, key)
    alignment = kv.get("general.alignment", 32)
    if kinds.get("general.alignment", U32) != U32 or alignment < 1 or alignment & (alignment - 1):
        raise cursor.damaged(f"general.alignment is {alignment!r}, but must be a power of two")
    entries = [_tensor_entry(cursor) for _ in range(n_tensors)]
    return _Shard(kv, kinds, _place(cursor, entries, alignment))


def _check_magic(cursor: Cursor) -> None:
    if cursor.size == 0:
        raise LoadFailed(f"{cursor.path} is empty")
    start = cursor.file.peek(32)[:32] if hasattr(cursor.file, "peek") else b""
    if not start.startswith(b"GGUF"):
        known = next((text for magic, text in FOREIGN.items() if start.startswith(magic)), None)
        what = f"{known}" if known else f"its first bytes are {start[:4].hex(' ')}"
        raise LoadFailed(f"{cursor.path} is not a GGUF file ({what})")
    cursor.take(4)
    version = cursor.number("<I")
    if version and version & 0xFFFF == 0:
        raise LoadFailed(f"{cursor.path} is a big-endian GGUF; llama.cpp needs a little-endian one")
    if version not in VERSIONS:
        newer = "newer than this release" if version > VERSIONS[-1] else "no longer supported"
        raise LoadFailed(
            f"{cursor.path} is GGUF version {version}, {newer}; versions 2 and 3 are supported"
        )


def _value(cursor: Cursor, kind: int, key: str) -> Any:
    if kind in SCALARS:
        return cursor.number("<" + SCALARS[kind])
    if kind == STRING:
        return cursor.text()
    if kind != ARRAY:
        raise cursor.damaged(f"{key} has the unknown value type {kind}")
    of, n = cursor.number("<I"), cursor.number("<Q")
    if of == STRING:
        cursor.expect(n, 8, f"strings in {key}")
        return cursor.texts(n, unique=key == "tokenizer.ggml.tokens", key=key)
    if of not in SCALARS:
        raise cursor.damaged(f"{key} is an array of the unknown value type {of}")
    width = struct.calcsize(SCALARS[of])
    cursor.expect(n, width, f"values in {key}")
    if n > MAX_KEPT:
        cursor.skip(n * width)
        return n
    return list(struct.unpack(f"<{n}{SCALARS[of]}", cursor.take(n * width)))


class _Entry(NamedTuple):
    name: str
    shape: tuple[int, ...]
    type: str
    n_bytes: int
    offset: int


def _tensor_entry(cursor: Cursor) -> _Entry:
    name = cursor.text()
    if len(name.encode()) > MAX_NAME:
        raise cursor.damaged(f"a tensor name is longer than {MAX_NAME} bytes: {name[:80]!r}")
    n_dims = cursor.number("<I")
    if n_dims > MAX_DIMS:
        raise cursor.damaged(f"tensor {name!r} has {n_dims} dimensions, more than {MAX_DIMS}")
    shape = tuple(cursor.number("<Q") for _ in range(n_dims)) or (1,)
    kind, offset = cursor.number("<I"), cursor.number("<Q")
    if kind not in TENSOR_TYPES:
        raise cursor.damaged(f"tensor {name!r} has the unknown type {kind}")
    of = TENSOR_TYPES[kind]
    if shape[0] % of.block:
        raise cursor.damaged(
            f"tensor {name!r} has rows of {shape[0]} values, but {of.name} needs multiples of "
            f"{of.block}"
        )
    n_bytes = math.prod(shape) // of.block * of.n_bytes
    return _Entry(name, shape, of.name, n_bytes, offset)


def _place(cursor: Cursor, entries: Sequence[_Entry], alignment: int) -> list[TensorInfo]:
    """Tensors with offsets in the file: each follows the last, padded to `alignment`, and fits."""

    def padded(n: int) -> int:
        return -(-n // alignment) * alignment

    start, end = padded(cursor.tell()), 0
    tensors = []
    for entry in entries:
        if entry.offset != end:
            how = "overlaps the previous tensor" if entry.offset < end else "leaves a gap"
            raise cursor.damaged(
                f"tensor {entry.name!r} starts at byte {entry.offset} of the data "
                f"instead of {end}: it {how}"
            )
        if start + end + entry.n_bytes > cursor.size:
            raise LoadFailed(
                f"{cursor.path} is cut short: tensor {entry.name!r} needs "
                f"{start + end + entry.n_bytes} bytes, the file has {cursor.size}"
            )
        tensors.append(TensorInfo(*entry[:4], offset=start + entry.offset, file=str(cursor.path)))
        end = padded(end + entry.n_bytes)
    return tensors
