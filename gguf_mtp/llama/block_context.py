"""A context that drafts whole blocks of tokens: DSpark's stages beside the target's context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import llama_cpp as L

from gguf_mtp.llama.batch_arrays import BatchArrays
from gguf_mtp.llama.context import Context, refused
from gguf_mtp.llama.context_options import ContextOptions
from gguf_mtp.llama.hidden_buffers import NextnRows
from gguf_mtp.types import Rows

__all__ = ["BlockContext"]


class BlockContext(Context):
    """A `types.Decoder` for two kinds of batches.

    Rows with `hidden`, what the target's layers read at their positions, go into the cache; they
    have no outputs, and their tokens do not matter. Rows without are blocks to draft: every row has
    logits, and `Output.hidden[k, 0]` is the confidence in the token that row k predicts. All blocks
    of a batch are equally long, at most `block_size`: others are drafted wrongly without a word.
    Source: llama.cpp `src/models/dflash.cpp`, graph_dsv4.
    """

    def __init__(
        self, model: Any, n_vocab: int, options: ContextOptions, beside: Context, block_size: int
    ) -> None:
        n_embd, n_features = beside.n_hidden, L.llama_model_n_embd(model)
        super().__init__(model, n_embd, n_vocab, options, beside=beside)
        L.llama_set_causal_attn(self._ctx, False)  # a block sees itself whole
        self._hidden = NextnRows(self._ctx, n_features, per_output=True)
        self._features = BatchArrays(options.n_batch, n_embd, has_tokens=False)
        self._block_size = block_size

    def _check_kind(self, rows: Sequence[Rows]) -> None:
        if all(r.hidden is not None for r in rows):
            if any(r.n_outputs for r in rows):
                raise refused("rows of the target's layers have no logits")
            return
        lengths = {len(r.tokens) for r in rows}
        if any(r.hidden is not None for r in rows) or len(lengths) > 1:
            raise refused("its blocks are not of one length")
        if max(lengths) > self._block_size or any(r.n_outputs != len(r.tokens) for r in rows):
            raise refused(f"a block has at most {self._block_size} rows, and logits for each")

    def _arrays_for(self, rows: Sequence[Rows]) -> BatchArrays:
        return self._features if rows[0].hidden is not None else self._batch
