"""A shallow copy of a model: some of its layers, byte for byte, without an MTP block.

It has its source's vocabulary, so it can draft for it: how a draft model does on a machine with no
second model. Nothing is trained; a layer that is left out is missed.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from pathlib import Path

from ..converters.gguf_file import HeaderEntry, header, offsets, pad
from ..errors import ConversionError
from ..gguf import model_facts
from ..gguf.ggml_types import TENSOR_TYPES
from ..gguf.header import raw_metadata
from ..types import TensorInfo

_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_NUMBERS = {kind.name: number for number, kind in TENSOR_TYPES.items()}


def shallow_copy(source: Path, out: Path, layers: Sequence[int]) -> Path:
    """Writes the layers `layers` of `source` as the model `out`.

    Raises `ConversionError` for layers that are not there or not in order, and what
    `model_facts.read` raises.
    """
    facts = model_facts.read(source)
    if list(layers) != sorted({i for i in layers if 0 <= i < facts.n_layer}) or not layers:
        raise ConversionError(
            f"cannot copy layers {list(layers)} of {source}, which has {facts.n_layer} layers: "
            "name existing layers, in ascending order"
        )
    place = {old: new for new, old in enumerate(layers)}
    kept = [(t, name) for t in facts.tensors if (name := _renamed(t.name, place)) is not None]
    kv = raw_metadata(source)
    n_dense = facts.kv.get(f"{facts.architecture}.leading_dense_block_count", 0)
    counts = {
        "block_count": len(layers),
        "nextn_predict_layers": 0,
        "leading_dense_block_count": sum(i < n_dense for i in layers),
    }
    for key, n in counts.items():
        name = f"{facts.architecture}.{key}"
        if name in kv:
            kv[name] = struct.pack("<II", 4, n)
    places = offsets([t.n_bytes for t, _ in kept])
    entries = [
        HeaderEntry(name, t.shape[::-1], _NUMBERS[t.type], at)
        for (t, name), at in zip(kept, places, strict=True)
    ]
    with out.open("wb") as file:
        file.write(header(kv, entries))
        for tensor, _ in kept:
            file.write(_bytes(tensor).ljust(pad(tensor.n_bytes), b"\0"))
    return out


def _renamed(name: str, place: dict[int, int]) -> str | None:
    """The tensor's name in the copy; None when its layer is left out."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return name
    new = place.get(int(match[1]))
    return None if new is None else f"blk.{new}.{match[2]}"


def _bytes(tensor: TensorInfo) -> bytes:
    with Path(tensor.file).open("rb") as file:
        file.seek(tensor.offset)
        return file.read(tensor.n_bytes)
