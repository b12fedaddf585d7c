"""Header bytes, read back by gguf's own reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as T
from gguf import GGUFReader

from gguf_mtp.converters.gguf_file import ALIGNMENT, TypedTensor, header, offsets, pad, size
from gguf_mtp.converters.tensors import OutputTensor

KV: dict[str, Any] = {
    "general.architecture": "deepseek2",
    "a.count": 2**32 - 1,
    "a.number": 0.25,
    "a.yes": True,
    "a.text": "｜ü",
    "a.empty": "",
    "a.texts": ["x", "", "日本"],
    "a.numbers": [1, -3],
}


def written(path: Path, tensors: list[OutputTensor], types: list[T]) -> GGUFReader:
    """A file whose tensor i is filled with the byte i + 1."""
    sizes = size(tensors, types)
    placed = [
        TypedTensor(*each) for each in zip(tensors, types, sizes, offsets(sizes), strict=True)
    ]
    with path.open("wb") as file:
        file.write(header(KV, [tensor.entry for tensor in placed]))
        for i, tensor in enumerate(placed, 1):
            file.write((bytes([i]) * tensor.n_bytes).ljust(pad(tensor.n_bytes), b"\0"))
    return GGUFReader(path)


def test_metadata(tmp_path: Path) -> None:
    fields = written(tmp_path / "x.gguf", [], []).fields
    assert {key: fields[key].contents() for key in KV} == KV


def test_tensors_of_any_size_are_aligned(tmp_path: Path) -> None:
    tensors = [OutputTensor("a", (5,), ()), OutputTensor("b", (3, 32), ()),
               OutputTensor("c", (2, 3, 256), ()), OutputTensor("d", (1,), ())]  # fmt: skip
    reader = written(tmp_path / "x.gguf", tensors, [T.F32, T.Q8_0, T.Q4_K, T.BF16])
    assert [t.name for t in reader.tensors] == ["a", "b", "c", "d"]
    assert [t.shape.tolist() for t in reader.tensors] == [[5], [32, 3], [256, 3, 2], [1]]
    assert [t.tensor_type for t in reader.tensors] == [T.F32, T.Q8_0, T.Q4_K, T.BF16]
    assert [int(t.n_bytes) for t in reader.tensors] == [20, 3 * 34, 6 * 144, 2]
    for i, tensor in enumerate(reader.tensors, 1):
        assert tensor.data_offset % ALIGNMENT == 0
        assert (tensor.data.view(np.uint8) == i).all()
