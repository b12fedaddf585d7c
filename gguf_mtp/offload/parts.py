"""A model cut into the parts that are placed as one, in the order of what they are worth.

A device's byte is worth what decoding reads through it: all of an attention's bytes at every token,
k of E of the routed experts'. So the order is: the MTP block without its routed experts (read at
every draft step), attention with its cache, shared experts and router of every layer, dense layers,
the output head, the MTP block's routed experts, then routed experts of as many layers as fit. From
the last layer to the first, as llama.cpp counts offloaded layers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from gguf_mtp.gguf.bytes_per_token import is_routed, layer_of
from gguf_mtp.offload.buffers import Contexts
from gguf_mtp.types import ModelFacts, TensorInfo

__all__ = ["Kind", "ModelPart", "Subject"]

Kind = Literal["block", "attention", "dense", "head", "block experts", "experts", "embedding"]
ORDER: tuple[Kind, ...] = (
    "block", "attention", "dense", "head", "block experts", "experts", "embedding",
)  # fmt: skip
_DENSE = re.compile(r"blk\.\d+\.ffn_(gate|up|down)\.")


@dataclass(frozen=True, slots=True)
class ModelPart:
    """Tensors that go to one place. `layer` is a layer's number, the MTP block's being the number
    of trunk layers; -1 for the head and the embedding, which belong to none. The embedding stays
    with the CPU: of it a token reads one row."""

    kind: Kind
    layer: int
    tensors: tuple[TensorInfo, ...]

    @property
    def n_bytes(self) -> int:
        return sum(t.n_bytes for t in self.tensors)

    @property
    def has_cache(self) -> bool:
        return self.kind in ("block", "attention")


@dataclass(frozen=True, slots=True)
class Subject:
    """What is placed: a model with its contexts, and the side file its MTP block comes from, if
    any, or stages that draft blocks. All of that is "the block", as one layer behind the trunk's;
    it is placed when `contexts.drafts`."""

    facts: ModelFacts
    contexts: Contexts
    side: ModelFacts | None = None

    @property
    def n_layers(self) -> int:
        """Trunk layers, and one for the MTP block when it is loaded."""
        return self.facts.n_layer + self.contexts.drafts

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """Every tensor that is loaded, in the order of the files."""
        n_layer = self.facts.n_layer
        loaded = n_layer + (self.contexts.drafts and self.side is None)
        own = [t for t in self.facts.tensors if (layer_of(t.name) or 0) < loaded]
        return (*own, *(self.side.tensors if self.side and self.contexts.drafts else ()))

    @property
    def is_tied(self) -> bool:
        """Whether the embedding is loaded once more as the output's matrix."""
        return all(t.name != "output.weight" for t in self.facts.tensors)

    def parts(self) -> list[ModelPart]:
        """The parts by worth, the embedding last."""
        found: dict[tuple[Kind, int], list[TensorInfo]] = {}
        side = {t.file for t in self.side.tensors} if self.side else set()
        for tensor in self.tensors:
            key = self._key(tensor, tensor.file in side)
            found.setdefault(key, []).append(tensor)
            if tensor.name == "token_embd.weight" and self.is_tied and tensor.file not in side:
                found.setdefault(("head", -1), []).append(tensor)
        ordered = sorted(found, key=lambda key: (ORDER.index(key[0]), -key[1]))
        return [ModelPart(kind, layer, tuple(found[kind, layer])) for kind, layer in ordered]

    def _key(self, tensor: TensorInfo, in_side: bool) -> tuple[Kind, int]:
        layer, n_layer = layer_of(tensor.name), self.facts.n_layer
        if in_side and tensor.name != "token_embd.weight":
            return ("block experts" if is_routed(tensor.name) else "block"), n_layer
        if layer is None:
            return ("head" if tensor.name.startswith("output") else "embedding"), -1
        if layer >= n_layer:
            return ("block experts" if is_routed(tensor.name) else "block"), n_layer
        if is_routed(tensor.name):
            return "experts", layer
        return ("dense" if _DENSE.match(tensor.name) else "attention"), layer
