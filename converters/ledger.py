"""The ledger makes sure that every tensor of a checkpoint meets a known end: written, merged into
another one, or dropped with a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..errors import ConversionError
from .checkpoint import FP4, SourceTensor
from .tensors import Fate, Weight

__all__ = ["SCALES", "Ledger"]

SCALES = ("F32", "F8_E8M0", "U8")
"""Types of FP8's block scales: numbers, or powers of two as their exponents (E8M0, which some
releases store as U8)."""
FP4_BLOCK = (1, 32)
"""Of MXFP4 (OCP Microscaling 1.0): a scale for 32 values of a row."""


class Ledger:
    """Hands out a checkpoint's tensors and remembers what became of each.

    `take` raises `ConversionError`, naming the tensor, when a required one is missing or has
    another shape than the configuration says.
    """

    def __init__(
        self,
        tensors: Mapping[str, SourceTensor],
        block: tuple[int, int] | None,
        scale_of: Callable[[str], str] = lambda name: f"{name}_scale_inv",
    ) -> None:
        """`scale_of` names the scales of a quantised tensor, whose FP8 has blocks of `block`."""
        self._tensors = tensors
        self._block, self._scale_of = block, scale_of
        self._fates: dict[str, Fate] = {}
        self.dropped: dict[str, str] = {}

    def has(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str, shape: tuple[int, ...], fate: Fate = "written") -> Weight:
        tensor = self._found(name)
        if tensor.dtype == "I8" and tensor.shape == (*shape[:-1], shape[-1] // 2):
            tensor = tensor._replace(dtype=FP4, shape=shape)  # two codes in a byte
        self._expect(tensor, shape)
        self._fates.setdefault(name, fate)
        return self._with_scale(tensor)

    def take_indices(self, name: str, shape: tuple[int, ...]) -> Weight:
        """As `take`, of whole numbers."""
        tensor = self._found(name)
        self._expect(tensor, shape)
        if tensor.dtype not in ("I32", "I64"):
            raise ConversionError(f"{name} is {tensor.dtype}, but must be whole numbers")
        self._fates.setdefault(name, "written")
        return Weight(tensor)

    def _found(self, name: str) -> SourceTensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ConversionError(f"the checkpoint has no {name}, which this architecture needs")
        return tensor

    def _expect(self, tensor: SourceTensor, shape: tuple[int, ...]) -> None:
        if tensor.shape != shape:
            raise ConversionError(
                f"{tensor.name} has shape {list(tensor.shape)}, but config.json implies "
                f"{list(shape)}"
            )

    def drop(self, name: str, reason: str) -> None:
        """Leave a tensor out on purpose, and its scale with it."""
        for each in (name, self._scale_of(name)):
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
        scale_name = self._scale_of(tensor.name)
        scale = self._tensors.get(scale_name)
        if tensor.dtype in ("BF16", "F16", "F32"):
            if scale is not None:
                raise ConversionError(f"{tensor.name} is {tensor.dtype}, but has a scale tensor")
            return Weight(tensor)
        if tensor.dtype not in ("F8_E4M3", FP4):
            raise ConversionError(f"{tensor.name} is {tensor.dtype}, which cannot be converted")
        if scale is None:
            kind = "FP4" if tensor.dtype == FP4 else "FP8"
            raise ConversionError(f"{tensor.name} is {kind}, but {scale_name} is missing")
        if scale.dtype not in SCALES:
            raise ConversionError(
                f"{scale.name} is {scale.dtype}, but must be one of {', '.join(SCALES)}"
            )
        block = FP4_BLOCK if tensor.dtype == FP4 else self._block
        if block is None:
            raise ConversionError(f"{tensor.name} is FP8, but config.json has no weight_block_size")
        rows, cols = block
        expected = (-(-tensor.n_rows // rows), -(-tensor.n_cols // cols))
        if len(tensor.shape) != 2 or scale.shape != expected:
            raise ConversionError(
                f"{scale.name} has shape {list(scale.shape)}, but blocks of {rows}x{cols} "
                f"require {list(expected)}"
            )
        self._fates.setdefault(scale.name, "merged")
        return Weight(tensor, scale, block)
