"""Importance matrices, as llama-imatrix writes them: how much each column of a weight matters.

The GGUF form holds sums of squared activations and counts per matrix (per expert); the older .dat
form one list of values per tensor. Values are read when a tensor is quantised: those of a 671 B
model are more than a gigabyte.

It knows nothing of types.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader

from ..errors import ConversionError
from ..types import Floats
from .tensors import OutputTensor

_SUMS, _COUNTS = ".in_sum2", ".counts"
_MAX_NAME = 1 << 12


class Imatrix:
    """One importance matrix file. Raises `ConversionError` when it is not one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                magic = file.read(4)
            self._read = _open_gguf(path) if magic == b"GGUF" else _open_legacy(path)
        except OSError as error:
            raise ConversionError(f"cannot read {path}: {error.strerror}") from None

    @property
    def fingerprint(self) -> str:
        status = self.path.stat()
        text = f"{self.path.name} {status.st_size} {status.st_mtime_ns}"
        return hashlib.sha256(os.fsencode(text)).hexdigest()

    def values(self, tensor: OutputTensor) -> Floats | None:
        """float32 [matrices, n_per_row], or None when the file does not know the tensor.

        Raises `ConversionError` when the sizes differ or a value is not finite.
        """
        read = self._read.get(tensor.name)
        if read is None:
            return None
        values = read()
        n_matrices = tensor.shape[0] if len(tensor.shape) == 3 else 1
        if values.size != n_matrices * tensor.n_per_row:
            # llama-imatrix counts the embedding's rows by use; llama-quantize ignores that one too.
            if tensor.name == "token_embd.weight":
                return None
            raise ConversionError(
                f"{self.path} has {values.size} values for {tensor.name}, "
                f"which needs {n_matrices * tensor.n_per_row}"
            )
        if not np.isfinite(values).all():
            raise ConversionError(f"{self.path} has a value for {tensor.name} that is not finite")
        return values.reshape(n_matrices, tensor.n_per_row)


def _open_gguf(path: Path) -> Mapping[str, Callable[[], Floats]]:
    try:
        tensors = {t.name: t for t in GGUFReader(path).tensors}
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise ConversionError(f"{path} is a damaged GGUF file: {error}") from None
    places = {name: (t.data_offset, t.n_elements) for name, t in tensors.items()}
    entries: dict[str, Callable[[], Floats]] = {}
    for name, tensor in tensors.items():
        if tensor.tensor_type is not GGMLQuantizationType.F32:
            raise ConversionError(f"{path}: {name} is {tensor.tensor_type.name}, but must be F32")
        if name.endswith(_SUMS):
            base = name.removesuffix(_SUMS)
            if base + _COUNTS not in places:
                raise ConversionError(f"{path} has sums for {base}, but no counts")
            entries[base] = _mean(path, places[name], places[base + _COUNTS])
    if not entries:
        raise ConversionError(f"{path} is a GGUF file, but has no importance matrix")
    return entries


def _mean(path: Path, sums: tuple[int, int], counts: tuple[int, int]) -> Callable[[], Floats]:
    """Sums over counts; a matrix that was never used weighs all its columns alike."""

    def read() -> Floats:
        total, count = _floats(path, *sums), np.rint(_floats(path, *counts))
        total = total.reshape(len(count), -1)
        used = count > 0
        mean = total / np.where(used, count, 1)[:, None].astype(np.float32)
        return np.where(used[:, None], mean, np.float32(1)).ravel()

    return read


def _open_legacy(path: Path) -> Mapping[str, Callable[[], Floats]]:
    entries: dict[str, Callable[[], Floats]] = {}
    size = path.stat().st_size
    with path.open("rb") as file:
        try:
            (n,) = struct.unpack("<i", file.read(4))
            for _ in range(n):
                (length,) = struct.unpack("<i", file.read(4))
                if not 0 < length < _MAX_NAME:
                    raise ValueError
                name = file.read(length).decode()
                n_calls, n_values = struct.unpack("<ii", file.read(8))
                at = file.tell()
                if n_values < 1 or at + 4 * n_values > size:
                    raise ValueError
                entries[name] = _over_calls(path, (at, n_values), n_calls)
                file.seek(4 * n_values, os.SEEK_CUR)
        except (struct.error, ValueError):
            raise ConversionError(f"{path} is not an importance matrix, or is damaged") from None
    if not entries:
        raise ConversionError(f"{path} is not an importance matrix: it has no entries")
    return entries


def _over_calls(path: Path, place: tuple[int, int], n_calls: int) -> Callable[[], Floats]:
    return lambda: _floats(path, *place) / np.float32(max(n_calls, 1))


def _floats(path: Path, offset: int, n: int) -> Floats:
    return np.fromfile(path, np.dtype("<f4"), count=n, offset=offset)
