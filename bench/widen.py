"""Memory-bound models that draft as well as the demo: the demo widened, its function kept.

A decode of the demo itself fits the processor's cache, so nothing about the cost of a row can be
learned from it. Here its layers get more columns, which read nothing (zero columns after them), and
more layers, which add nothing (zero output projections): the same logits, at the cost of a far
larger model. What pads a matrix is drawn from its own FP8 values. The result is a checkpoint in
DeepSeek-V3's layout, converted like any other; only the GGUF file is kept, in the user's cache.
"""

from __future__ import annotations

import re
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..converters import CONVERTER_VERSION
from ..converters.checkpoint import Checkpoint, SourceTensor
from ..converters.convert import ConvertOptions, Progress, convert
from ..demo import CHECKPOINT, cached
from .synthetic import Entry, write

VERSION = 1
_BLOCK = 128  # rows and columns that share an FP8 scale
_ROUTER_SPREAD = 0.2  # of random router weights: every expert gets its share of the rows
_MLP = re.compile(
    r"mlp\.(experts\.\d+\.|shared_experts\.)?(gate|up|down)_proj\.weight(_scale_inv)?"
)
_OUTPUT = re.compile(r".*\.(o_proj|down_proj)\.weight")

Bytes = NDArray[np.uint8]


class Widening(NamedTuple):
    """How much wider: `n_dense` layers more in front and `n_moe` behind the trunk's own; all are
    `dense_ff` and `moe_ff` wide then."""

    n_dense: int
    dense_ff: int
    n_moe: int
    moe_ff: int


KINDS: dict[str, tuple[str, Widening]] = {
    "dense-bf16": ("bf16", Widening(n_dense=14, dense_ff=16384, n_moe=0, moe_ff=192)),
    "moe-q8_0": ("q8_0", Widening(n_dense=0, dense_ff=768, n_moe=6, moe_ff=4096)),
    "moe-q4_0": ("q4_0", Widening(n_dense=0, dense_ff=768, n_moe=6, moe_ff=4096)),
}
"""Where checking a draft is cheap (each weight is read once for all rows), and where it is dear
(each row wakes its own experts): 0.4, 0.4 and 0.2 GB."""


def widened_model(
    kind: str,
    cache: Path | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Path:
    """The GGUF file of one of `KINDS`, made first when the cache does not hold it."""
    type_, widening = KINDS[kind]

    def make(out: Path) -> None:
        with tempfile.TemporaryDirectory(dir=out.parent) as folder:
            checkpoint = widen(Path(folder) / "checkpoint", widening)
            convert(checkpoint, out, ConvertOptions(type=type_, name=kind), progress)

    return cached(f"demo-{kind}-v{CONVERTER_VERSION}.{VERSION}", make, cache)


def widen(folder: Path, widening: Widening, source: Path = CHECKPOINT) -> Path:
    """The checkpoint `source`, widened, in `folder`. Raises what opening a checkpoint raises."""
    with Checkpoint(source) as checkpoint:
        plan = _Plan(checkpoint, widening)
        config = checkpoint.config | {
            "num_hidden_layers": len(plan.layers) - 1,
            "first_k_dense_replace": widening.n_dense + plan.n_dense,
            "intermediate_size": widening.dense_ff,
            "moe_intermediate_size": widening.moe_ff,
        }
        parts = {part.entry: part for part in plan.parts()}
        return write(folder, config, list(parts), lambda entry: plan.bytes_of(parts[entry]), 4)


class _WidenedPart(NamedTuple):
    """A tensor to write, and what it is made from. `is_silent`: its layer must add nothing."""

    entry: Entry
    source: SourceTensor
    is_silent: bool


class _Plan:
    def __init__(self, checkpoint: Checkpoint, widening: Widening) -> None:
        self.checkpoint, self.widening = checkpoint, widening
        n_layer = checkpoint.config["num_hidden_layers"]
        self.n_dense = checkpoint.config["first_k_dense_replace"]
        # (source layer, silent) by new layer; the last one is the MTP block
        self.layers = [
            *[(0, True)] * widening.n_dense,
            *[(i, False) for i in range(n_layer)],
            *[(self.n_dense, True)] * widening.n_moe,
            (n_layer, False),
        ]

    def parts(self) -> Iterator[_WidenedPart]:
        """Every tensor of the widened checkpoint."""
        by_layer: dict[int, list[tuple[str, SourceTensor]]] = {}
        for tensor in self.checkpoint.tensors.values():
            match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", tensor.name)
            if match:
                by_layer.setdefault(int(match[1]), []).append((match[2], tensor))
            else:
                yield _WidenedPart(Entry(tensor.name, tensor.dtype, tensor.shape), tensor, False)
        for i, (layer, is_silent) in enumerate(self.layers):
            for rest, tensor in by_layer[layer]:
                entry = Entry(f"model.layers.{i}.{rest}", tensor.dtype, self._shape(rest, tensor))
                yield _WidenedPart(entry, tensor, is_silent)

    def _shape(self, rest: str, tensor: SourceTensor) -> tuple[int, ...]:
        match = _MLP.fullmatch(rest)
        if not match:
            return tensor.shape
        width = self.widening.moe_ff if match[1] else self.widening.dense_ff
        if match[3]:
            width = -(-width // _BLOCK)
        rows, cols = tensor.shape
        return (rows, width) if match[2] == "down" else (width, cols)

    def bytes_of(self, part: _WidenedPart) -> bytes:
        entry, source = part.entry, part.source
        raw = np.empty(source.n_bytes, np.uint8)
        self.checkpoint.read_into(source, 0, raw.data)
        rng = np.random.default_rng(zlib.crc32(entry.name.encode()))
        if part.is_silent and _OUTPUT.fullmatch(entry.name):
            return bytes(entry.n_bytes)
        if part.is_silent and entry.name.endswith("mlp.gate.weight"):
            weights = rng.normal(0, _ROUTER_SPREAD, entry.shape).astype(np.float32)
            return (weights.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        if entry.shape == source.shape:
            return raw.tobytes()
        if entry.dtype == "F32":
            return _pad_scales(raw, source.shape, entry.shape)
        return _pad_values(raw.reshape(source.shape), entry.shape, rng)


def _pad_values(old: Bytes, shape: tuple[int, ...], rng: np.random.Generator) -> bytes:
    """FP8 values: new rows drawn from the old values, new columns zero."""
    rows, cols = old.shape
    new = np.zeros(shape, np.uint8)
    new[:rows, :cols] = old
    new[rows:, :cols] = rng.choice(old.ravel(), (shape[0] - rows, cols))
    return new.tobytes()


def _pad_scales(raw: Bytes, old: tuple[int, ...], shape: tuple[int, ...]) -> bytes:
    """Scales of blocks that were added are those of the last block before them."""
    scales = raw.view(np.float32).reshape(old)
    grow = [(0, new - n) for new, n in zip(shape, old, strict=True)]
    return np.pad(scales, grow, mode="edge").tobytes()
