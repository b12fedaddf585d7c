"""The nouns of a conversion: which rows of which source tensors make up each output tensor.

An output is a list of pieces, so that one loop streams everything: a plain tensor is one piece,
stacked experts are one piece per expert, and the halves of MLA's kv_b are one piece per head. The
ledger makes sure that every source tensor meets a known end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from ..errors import ConversionError
from .checkpoint import SourceTensor

Fate = Literal["written", "merged"]
Value = bool | int | float | str | list[str] | list[int]


class Weight(NamedTuple):
    """A source tensor, and for FP8 its inverse scales: one per `block` (rows, columns), F32."""

    tensor: SourceTensor
    scale: SourceTensor | None = None
    block: tuple[int, int] = (1, 1)


class SourceRows(NamedTuple):
    """Rows `row` to `row + n_rows` of a weight; `transposed`, its columns become rows."""

    weight: Weight
    row: int
    n_rows: int
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns as they stand in the output."""
        n_cols = self.weight.tensor.n_cols
        return (n_cols, self.n_rows) if self.transposed else (self.n_rows, n_cols)


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor of the GGUF file. `shape` is outermost first; the pieces' rows follow each other."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[SourceRows, ...]

    @property
    def n_per_row(self) -> int:
        return self.shape[-1]

    @property
    def n_rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Adapted:
    """What an architecture makes of a checkpoint.

    `kv` is GGUF metadata without the vocabulary. `mtp_block` is the number of the block that holds
    the MTP tensors, None without one. `dropped` maps source names to reasons; `n_written` and
    `n_merged` count the other source tensors. `notes` are sentences worth logging.
    """

    architecture: str
    kv: dict[str, Value]
    tensors: tuple[OutputTensor, ...]
    mtp_block: int | None
    n_written: int
    n_merged: int
    dropped: dict[str, str]
    notes: tuple[str, ...]


class Source(Protocol):
    """A checkpoint as planning sees it: `checkpoint.Checkpoint`, or one that is only announced."""

    @property
    def config(self) -> dict[str, Any]: ...
    @property
    def tensors(self) -> Mapping[str, SourceTensor]: ...
    def read_into(self, tensor: SourceTensor, offset: int, buffer: memoryview) -> None: ...


class Books(Protocol):
    """What hands out source tensors: `Ledger`, or one of a checkpoint that is only announced."""

    @property
    def dropped(self) -> dict[str, str]: ...
    def has(self, name: str) -> bool: ...
    def take(self, name: str, shape: tuple[int, ...], fate: Fate = "written") -> Weight: ...
    def drop(self, name: str, reason: str) -> None: ...
    def settle(self) -> tuple[int, int]: ...


class Ledger:
    """Hands out a checkpoint's tensors and remembers what became of each.

    `take` raises `ConversionError`, naming the tensor, when a required one is missing or has
    another shape than the configuration says.
    """

    def __init__(self, tensors: Mapping[str, SourceTensor], block: tuple[int, int] | None) -> None:
        self._tensors = tensors
        self._block = block
        self._fates: dict[str, Fate] = {}
        self.dropped: dict[str, str] = {}

    def has(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str, shape: tuple[int, ...], fate: Fate = "written") -> Weight:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ConversionError(f"the checkpoint has no {name}, which this architecture needs")
        if tensor.shape != shape:
            raise ConversionError(
                f"{name} has shape {list(tensor.shape)}, but config.json implies {list(shape)}"
            )
        self._fates.setdefault(name, fate)
        return self._with_scale(tensor)

    def drop(self, name: str, reason: str) -> None:
        """Leave a tensor out on purpose, and its scale with it."""
        for each in (name, f"{name}_scale_inv"):
            if each in self._tensors and each not in self._fates:
                self.dropped[each] = reason

    def settle(self) -> tuple[int, int]:
        """(written, merged). Raises for tensors that nobody asked for and for a wrong sum."""
        left = [n for n in self._tensors if n not in self._fates and n not in self.dropped]
        if left:
            raise ConversionError(
                f"the checkpoint's {left[0]} is unknown"
                + (f" ({len(left)} unknown tensors in all)" if len(left) > 1 else "")
                + "; leaving it out would change the model"
            )
        merged = sum(fate == "merged" for fate in self._fates.values())
        written = len(self._fates) - merged
        if written + merged + len(self.dropped) != len(self._tensors):
            raise ConversionError(
                f"{len(self._tensors)} tensors were read, but {written} written, "
                f"{merged} merged and {len(self.dropped)} dropped"
            )
        return written, merged

    def _with_scale(self, tensor: SourceTensor) -> Weight:
        """FP8 is what has a scale beside it, whatever the configuration says of the layer."""
        scale = self._tensors.get(f"{tensor.name}_scale_inv")
        if tensor.dtype in ("BF16", "F16", "F32"):
            if scale is not None:
                raise ConversionError(f"{tensor.name} is {tensor.dtype}, but has a scale tensor")
            return Weight(tensor)
        if tensor.dtype != "F8_E4M3":
            raise ConversionError(f"{tensor.name} is {tensor.dtype}, which cannot be converted")
        if scale is None:
            raise ConversionError(f"{tensor.name} is FP8, but {tensor.name}_scale_inv is missing")
        if scale.dtype != "F32":
            raise ConversionError(f"{scale.name} is {scale.dtype}, but must be F32")
        if self._block is None:
            raise ConversionError(f"{tensor.name} is FP8, but config.json has no weight_block_size")
        rows, cols = self._block
        expected = (-(-tensor.n_rows // rows), -(-tensor.n_cols // cols))
        if len(tensor.shape) != 2 or scale.shape != expected:
            raise ConversionError(
                f"{scale.name} has shape {list(scale.shape)}, but blocks of {rows}x{cols} "
                f"require {list(expected)}"
            )
        self._fates.setdefault(scale.name, "merged")
        return Weight(tensor, scale, self._block)
