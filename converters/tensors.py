"""The nouns of a conversion: which rows of which source tensors make up each output tensor.

An output is a list of pieces, so that one loop streams everything: a plain tensor is one piece,
stacked experts are one piece per expert, and the halves of MLA's kv_b are one piece per head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from .checkpoint import SourceTensor

Fate = Literal["written", "merged"]
Side = Literal["mtp", "dspark"]
"""What the drafter in a file of its own is, and what that file's name begins with."""
Value = bool | int | float | str | list[str] | list[int] | list[float]


class Weight(NamedTuple):
    """A source tensor, and for FP8 its inverse scales: one per `block` (rows, columns)."""

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
    """A tensor of the GGUF file. `shape` is outermost first; the pieces' rows follow each other, or
    with `beside` lie side by side. `is_index`: whole numbers, which are looked up."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[SourceRows, ...]
    beside: bool = False
    is_index: bool = False

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
    the MTP tensors, None without one. `side` is the drafter that needs a file of its own, which is
    not this one; `is_dspark`: this one is that file, of stages that draft whole blocks.
    `chat_template` makes one for a model of this name whose checkpoint has none. `dropped` maps
    source names to reasons; `n_written` and `n_merged` count the other source tensors. `notes` are
    sentences worth logging.
    """

    architecture: str
    kv: dict[str, Value]
    tensors: tuple[OutputTensor, ...]
    mtp_block: int | None
    n_written: int
    n_merged: int
    dropped: dict[str, str]
    notes: tuple[str, ...]
    side: Side | None = None
    is_dspark: bool = False
    chat_template: Callable[[str], str] | None = None


class Source(Protocol):
    """A checkpoint as planning sees it: `checkpoint.Checkpoint`, or one that is only announced."""

    @property
    def config(self) -> dict[str, Any]: ...
    @property
    def tensors(self) -> Mapping[str, SourceTensor]: ...
    def read_into(self, tensor: SourceTensor, offset: int, buffer: memoryview) -> None: ...


class Books(Protocol):
    """What hands out source tensors: `ledger.Ledger`, or one of a checkpoint that is only
    announced."""

    @property
    def dropped(self) -> dict[str, str]: ...
    def has(self, name: str) -> bool: ...
    def take(self, name: str, shape: tuple[int, ...], fate: Fate = "written") -> Weight: ...
    def take_indices(self, name: str, shape: tuple[int, ...]) -> Weight: ...
    def drop(self, name: str, reason: str) -> None: ...
    def settle(self) -> tuple[int, int]: ...
