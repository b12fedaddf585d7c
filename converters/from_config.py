"""A checkpoint that nobody has: what its config.json says a conversion would make of it.

Every tensor that the family asks for is there, in the shape it asks for; so the result is the
header that a conversion would write, without a byte of weights.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ..gguf.header import Header
from ..gguf.model_facts import facts
from ..types import ModelFacts, TensorInfo
from . import families, recipes
from .checkpoint import SourceTensor, read_json
from .gguf_file import size
from .mla import Choices
from .tensors import Fate, Weight

__all__ = ["facts_from_config"]


def facts_from_config(config: Path, type_: str) -> ModelFacts:
    """The facts of the file that `convert --type` would make of a checkpoint with this config.json.

    Raises `ConversionError` for a configuration or a type that cannot be converted.
    """
    promise = _Promise(read_json(config), config.stem)
    wish = recipes.QuantOptions(recipes.parse_recipe(type_))
    adapted = families.adapt(promise, Choices(), promise)
    types = recipes.choose(adapted, wish).types
    tensors = [
        TensorInfo(t.name, t.shape[::-1], kind.name, n_bytes, 0, str(config))
        for t, kind, n_bytes in zip(
            adapted.tensors, types, size(adapted.tensors, types), strict=True
        )
    ]
    kv = {
        "general.architecture": adapted.architecture,
        "general.name": f"{config.stem} {type_}",
        **adapted.kv,
    }
    return facts(Header(kv, tuple(tensors)), str(config))


class _Promise:
    """As a checkpoint (`Source`): an MTP block where the configuration names one. As its books
    (`Books`): whatever is asked for, as BF16."""

    def __init__(self, config: dict[str, Any], name: str) -> None:
        self.config, self._name = config, name
        n_layer, n_mtp = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers")
        block = f"model.layers.{n_layer}.eh_proj.weight"
        self.tensors = {block: self._tensor(block, (1,))} if n_mtp else {}
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
        return SourceTensor(name, "BF16", shape, self._name, 0, 2 * math.prod(shape))
