"""Importance matrices in both forms that llama-imatrix has written."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gguf import GGUFWriter
from numpy.typing import NDArray

Values = Mapping[str, tuple[NDArray[np.float32], int]]
"""Per tensor: importances of all its matrices in a row, and how many matrices there are."""

COUNT = 64  # a power of two: the mean of sums is exact


def write_gguf(path: Path, values: Values) -> None:
    """A matrix whose importances are all 1 is written as one that was never used."""
    writer = GGUFWriter(path, "imatrix")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["text.txt"])
    writer.add_uint32("imatrix.chunk_count", 1)
    writer.add_uint32("imatrix.chunk_size", 512)
    for name, (importances, n_matrices) in values.items():
        rows = importances.reshape(n_matrices, -1)
        counts = np.where((rows == 1).all(1), 0, COUNT).astype(np.float32)
        writer.add_tensor(f"{name}.in_sum2", rows * counts[:, None])
        writer.add_tensor(f"{name}.counts", counts[:, None])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_legacy(path: Path, values: Values) -> None:
    with path.open("wb") as file:
        file.write(struct.pack("<i", len(values)))
        for name, (importances, _) in values.items():
            raw = name.encode()
            file.write(struct.pack("<i", len(raw)) + raw)
            file.write(struct.pack("<ii", COUNT, importances.size))
            file.write((importances * np.float32(COUNT)).tobytes())
        file.write(struct.pack("<i", 1) + struct.pack("<i", 8) + b"text.txt")
