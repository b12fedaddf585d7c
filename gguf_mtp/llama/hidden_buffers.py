"""Where a context's hidden rows come from: behind the last layer, or from layers' inputs.

llama.cpp puts either out only when told so, and lays its graph's memory out anew for it.
"""

from __future__ import annotations

from typing import Any, Protocol

import llama_cpp as L
import numpy as np

from gguf_mtp.llama.binding import layer_inputs, nextn, reserve_again
from gguf_mtp.llama.output_buffer import OutputBuffer
from gguf_mtp.types import Floats

__all__ = ["HiddenBuffer", "LayerInputs", "NextnRows"]


class HiddenBuffer(Protocol):
    """`per_output`: only rows with logits have one. `rows(n)`: float32 [n, width] of the latest
    decode, valid until the next."""

    per_output: bool

    def rows(self, n: int) -> Floats: ...


class NextnRows:
    """The rows that an MTP block reads, and that it puts out itself: `width` wide."""

    def __init__(self, ctx: Any, width: int, per_output: bool) -> None:
        self.per_output = per_output
        self._ctx, self._buffer = ctx, OutputBuffer(width)
        nextn("llama_set_embeddings_nextn")(ctx, True, per_output)
        reserve_again(ctx)
        self._get = nextn("llama_get_embeddings_nextn")

    def rows(self, n: int) -> Floats:
        return self._buffer.rows(self._get(self._ctx), n)


class LayerInputs:
    """What the given layers read, side by side: of residual streams, their mean."""

    per_output = False

    def __init__(self, ctx: Any, layers: tuple[int, ...]) -> None:
        self._ctx, self._layers = ctx, layers
        n_embd = L.llama_model_n_embd(L.llama_get_model(ctx))
        self._buffers = [OutputBuffer(n_embd) for _ in layers]
        switch, self._get = layer_inputs()
        for layer in layers:
            switch(ctx, layer, True)

    def rows(self, n: int) -> Floats:
        parts = [
            buffer.rows(self._get(self._ctx, layer), n)
            for layer, buffer in zip(self._layers, self._buffers, strict=True)
        ]
        return np.concatenate(parts, axis=1)
