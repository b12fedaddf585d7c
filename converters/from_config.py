"""A checkpoint that nobody has: what its config.json says a conversion would make of it.

Every tensor that the family asks for is there, in the shape it asks for; so the result is the
headers that a conversion would write, without a byte of weights.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

from ..gguf.header import Header
from ..gguf.model_facts import facts, facts_of_any
from ..types import ModelFacts, TensorInfo
from . import families, recipes
from .checkpoint import FP4, SourceTensor, read_json
from .gguf_file import size
from .mla import Choices
from .tensors import Adapted, Fate, Weight

__all__ = ["PromisedFacts", "facts_from_config"]


class PromisedFacts(NamedTuple):
    """Of a file that would be written, and of the drafter's where that is a file of its own."""

    model: ModelFacts
    side: ModelFacts | None


def facts_from_config(config: Path, type_: str) -> PromisedFacts:
    """The facts of what `convert --type` would make of a checkpoint with this config.json.

    Raises `ConversionError` for a configuration or a type that cannot be converted.
    """
    promise = _Promise(read_json(config), config.stem)
    wish = recipes.QuantOptions(recipes.parse_recipe(type_))
    adapted = families.adapt(promise, Choices(), promise)
    name, side = f"{config.stem} {type_}", None
    if adapted.side:
        file = f"{adapted.side}-{config}"
        drafter = families.adapt(promise, Choices("only"), promise)
        side = facts_of_any(_header(drafter, wish, name, file), file)
    return PromisedFacts(facts(_header(adapted, wish, name, str(config)), str(config)), side)


def _header(adapted: Adapted, wish: recipes.QuantOptions, name: str, file: str) -> Header:
    types = recipes.choose(adapted, wish).types
    sizes = size(adapted.tensors, types)
    tensors = tuple(
        TensorInfo(t.name, t.shape[::-1], kind.name, n_bytes, 0, file)
        for t, kind, n_bytes in zip(adapted.tensors, types, sizes, strict=True)
    )
    kv = {"general.architecture": adapted.architecture, "general.name": name, **adapted.kv}
    return Header(kv, tensors)


class _Promise:
    """As a checkpoint (`Source`): with the drafter that the configuration names. As its books
    (`Books`): whatever is asked for, as BF16, or experts as FP4 where the configuration says so."""

    def __init__(self, config: dict[str, Any], name: str) -> None:
        self.config, self._name = config, name
        self._has_fp4 = config.get("expert_dtype") == "fp4"
        self.tensors = {name: self._tensor(name, (1,)) for name in _drafter_names(config)}
        self.dropped: dict[str, str] = {}

    def read_into(self, tensor: SourceTensor, offset: int, buffer: memoryview) -> None:
        raise AssertionError(f"{tensor.name} has no byte {offset} for {len(buffer)}")

    def has(self, name: str) -> bool:
        return name in self.tensors

    def take(self, name: str, shape: tuple[int, ...], fate: Fate = "written") -> Weight:
        del fate
        return Weight(self._tensor(name, shape))

    def take_indices(self, name: str, shape: tuple[int, ...]) -> Weight:
        return self.take(name, shape)

    def drop(self, name: str, reason: str) -> None:
        """Nothing is there to be dropped."""

    def settle(self) -> tuple[int, int]:
        return 0, 0

    def _tensor(self, name: str, shape: tuple[int, ...]) -> SourceTensor:
        dtype = FP4 if self._has_fp4 and ".experts." in name else "BF16"
        return SourceTensor(name, dtype, shape, self._name, 0, 2 * math.prod(shape))


_N_STAGES = 3
"""Of DSpark, in every release; its configurations do not say."""


def _drafter_names(config: dict[str, Any]) -> list[str]:
    """Tensors by which the families know what a checkpoint drafts with."""
    if "dspark_block_size" in config:
        return ["mtp.0.main_proj.weight", f"mtp.{_N_STAGES - 1}.norm.weight"]
    if not config.get("num_nextn_predict_layers"):
        return []
    n_layer = config.get("num_hidden_layers")
    return [f"model.layers.{n_layer}.eh_proj.weight", "mtp.0.e_proj.weight"]
