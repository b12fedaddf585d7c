"""A folder of safetensors shards: which tensors it holds, and their bytes on demand.

Opening it is the pre-pass: every shard is checked for presence, header, length and dtypes before
anything is read, and the first thing wrong is named by file. Bytes are read with `preadv` into the
caller's buffer, never mapped, so memory stays the caller's decision. The format is parsed here
because the safetensors package's numpy API knows no FP8.

It knows nothing of architectures: names are only names.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import struct
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ConversionError
from .local_shards import LocalShards, Shards

ITEM_SIZE = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
FP4 = "F4"
"""What a tensor is called that holds two E2M1 codes in each byte, the first one low; checkpoints
store it as I8. Its shape counts codes."""
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_HEADER = 100_000_000  # the format's own limit
_MAX_TEXT = 256 << 20
_LFS = b"version https://git-lfs"
_POINTER = "is a Git LFS pointer, not the file; run git lfs pull"


def n_bytes_of(dtype: str, n: int) -> int:
    """Bytes of `n` values."""
    return n // 2 if dtype == FP4 else n * ITEM_SIZE[dtype]


class SourceTensor(NamedTuple):
    """Where one tensor lies: `shape` is outermost first, `begin` a byte offset in shard `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    begin: int
    n_bytes: int

    @property
    def n_cols(self) -> int:
        return self.shape[-1] if self.shape else 1

    @property
    def n_rows(self) -> int:
        return math.prod(self.shape[:-1])


Needs = Callable[[Mapping[str, Any], str], bool]


class Checkpoint:
    """An open checkpoint. `tensors` maps names to places; `config` is config.json.

    Raises `ConversionError`, naming the file, for whatever the pre-pass finds. Use it as a context
    manager: it owns the shards' file descriptors. `read_into` may be called from several threads.
    Of an indexed checkpoint, shards without a tensor that `needs(config, name)` need not exist.
    `shards` are read where they lie, in `folder` unless told otherwise.
    """

    def __init__(
        self, folder: Path, needs: Needs | None = None, shards: Shards | None = None
    ) -> None:
        if not folder.is_dir():
            raise ConversionError(f"{folder} is not a folder; give a checkpoint's folder")
        self.folder = folder
        self.config = read_json(folder / "config.json")
        self.tensors: dict[str, SourceTensor] = {}
        self._shards: Shards = shards or LocalShards(folder)
        self._files: set[str] = set()
        self._digest = hashlib.sha256()
        self._needs = needs
        try:
            self._open_shards()
            self._shards.expect(self.n_bytes)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._shards.close()

    @property
    def n_files(self) -> int:
        return len(self._files)

    @property
    def n_bytes(self) -> int:
        return sum(t.n_bytes for t in self.tensors.values())

    @property
    def fingerprint(self) -> str:
        """Changes when a shard's name, size, time of change or header does."""
        return self._digest.hexdigest()

    def json(self, name: str) -> dict[str, Any] | None:
        """The object in the file `name`, or None when the checkpoint has no such file."""
        path = self.folder / name
        return read_json(path) if path.exists() else None

    def read_into(self, tensor: SourceTensor, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the tensor's bytes from byte `offset` on.

        Raises `OSError` with the shard's name: a disk or network that fails may come back.
        """
        self._shards.read_into(tensor.file, tensor.begin + offset, buffer)

    def _open_shards(self) -> None:
        promised = self._promised()
        if self._needs:
            needed = {file for name, file in promised.items() if self._needs(self.config, name)}
            promised = {name: file for name, file in promised.items() if file in needed}
        files = sorted(set(promised.values())) or [SINGLE]
        missing = [f for f in files if not self._shards.has(f)]
        if missing:
            raise ConversionError(
                f"{self.folder / missing[0]} is missing"
                + (f" ({len(missing)} of {len(files)} shards missing)" if len(files) > 1 else "")
            )
        for file in files:
            for tensor in self._open_shard(file):
                if tensor.name in self.tensors:
                    other = self.tensors[tensor.name].file
                    raise ConversionError(f"{tensor.name} is in both {other} and {file}")
                self.tensors[tensor.name] = tensor
        for name, file in promised.items():
            if name not in self.tensors or self.tensors[name].file != file:
                raise ConversionError(
                    f"{self.folder / file} does not hold {name}, but the index says it does"
                )

    def _promised(self) -> Mapping[str, str]:
        path = self.folder / INDEX
        if not path.exists():
            if self._shards.has(SINGLE):
                return {}
            raise ConversionError(
                f"{self.folder} holds neither {INDEX} nor {SINGLE}{_what_else(self.folder)}"
            )
        weight_map = read_json(path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ConversionError(f"{path} has no weight_map")
        if not all(isinstance(file, str) for file in weight_map.values()):
            raise ConversionError(f"{path} has a weight_map with values that are not file names")
        for file in set(weight_map.values()):
            if Path(file).name != file:
                raise ConversionError(f"{path} names the shard {file!r}, which is not a file name")
        return weight_map

    def _open_shard(self, file: str) -> list[SourceTensor]:
        path = self.folder / file
        try:
            size, stamp = self._shards.open(file)
            header = _read_header(partial(self._shards.read_into, file), path, size)
        except OSError as error:
            raise ConversionError(f"cannot open {path}: {error.strerror}") from None
        self._files.add(file)
        self._digest.update(os.fsencode(f"{file} {size} {stamp} ") + header)
        return _parse_header(header, path, size)


def folder_name(folder: Path) -> str:
    """The name of a checkpoint's folder as its user calls it: a link's own, not its target's, which
    in a hub's cache is a hash."""
    return folder.resolve().name if folder.name in ("", "..") else folder.name


def _what_else(folder: Path) -> str:
    """What a folder without safetensors or their index holds instead, and what to do."""
    if any(folder.glob("*.safetensors")):
        return f", but other .safetensors files; get {INDEX} from where they are from"
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
        return ", but PyTorch files; save the model as safetensors first"
    if any(folder.glob("*.gguf")):
        return ", but a GGUF file, which needs no conversion"
    return ""


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises `ConversionError` when it is absent or holds none."""
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        if text.startswith(_LFS.decode()):
            raise ConversionError(f"{path} {_POINTER}") from None
        raise ConversionError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConversionError(f"{path} is not a JSON object")
    return value


def read_text(path: Path) -> str:
    """A file beside the weights. Raises `ConversionError` when it is absent, too large, or no
    text."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a device or a pipe may never end
            raise ConversionError(f"{path} is not a regular file")
        if status.st_size > _MAX_TEXT:
            raise ConversionError(
                f"{path} has {status.st_size} bytes, but at most {_MAX_TEXT} are read of it"
            )
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConversionError(f"{path} is missing") from None
    except OSError as error:
        raise ConversionError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConversionError(f"{path} is not UTF-8: {error.reason}") from None


def _read_header(read: Callable[[int, memoryview], None], path: Path, size: int) -> bytes:
    def take(at: int, n: int) -> bytes:
        raw = bytearray(min(n, size - at))
        read(at, memoryview(raw))
        return bytes(raw)

    start = take(0, 8 + len(_LFS))
    if start.startswith(_LFS):
        raise ConversionError(f"{path} {_POINTER}")
    if len(start) < 8:
        raise ConversionError(f"{path} is not a safetensors file: it has {size} bytes")
    (n,) = struct.unpack("<Q", start[:8])
    if n > _MAX_HEADER:
        raise ConversionError(f"{path} is not a safetensors file: its header would have {n} bytes")
    header = take(8, n)
    if len(header) < n:
        raise ConversionError(f"{path} is cut short inside its header ({size} of {8 + n} bytes)")
    return header


def _tensor(name: str, entry: Mapping[str, Any], path: Path, start: int) -> SourceTensor:
    """One entry of a header; raises `ValueError` or `TypeError` for types the format has not."""
    dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not isinstance(shape, list):
        raise TypeError
    if not all(type(n) is int for n in (*shape, begin, end)):
        raise TypeError
    return SourceTensor(name, dtype, tuple(shape), path.name, start + begin, end - begin)


def _parse_header(header: bytes, path: Path, size: int) -> list[SourceTensor]:
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        tensors = [_tensor(name, entry, path, 8 + len(header)) for name, entry in entries.items()]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        raise ConversionError(f"{path} has a safetensors header that cannot be read") from None
    end = 8 + len(header)
    for t in sorted(tensors, key=lambda t: (t.begin, t.n_bytes)):
        if t.dtype not in ITEM_SIZE:
            raise ConversionError(f"{path}: {t.name} has the unknown dtype {t.dtype}")
        if min(t.shape, default=1) < 0 or t.n_bytes != math.prod(t.shape) * ITEM_SIZE[t.dtype]:
            raise ConversionError(
                f"{path}: {t.name} is {t.dtype} {list(t.shape)} but has {t.n_bytes} bytes"
            )
        if t.begin != end:
            raise ConversionError(f"{path}: {t.name} does not begin where the previous tensor ends")
        end += t.n_bytes
    if size != end:
        what = "cut short" if size < end else "longer than its header says"
        raise ConversionError(f"{path} is {what}: {size} bytes instead of {end}")
    return tensors
