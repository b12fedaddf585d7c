"""Drafting with DSpark: DeepSeek-V4's stages that guess a whole block of tokens in one decode.

The stages attend to what some of the target's layers read at the certain rows, and then fill a
block whose first row is the last certain token: row k predicts the token behind it, and a Markov
head makes each prediction depend on the one before. `observe` buffers the layers' rows; `propose`
brings the cache up to date and decodes one block for every sequence. So a draft costs two decodes,
however long it is.

The Markov head goes on from its own likeliest tokens. A draft therefore ends behind a token that
was drawn otherwise: what follows was guessed for another text.

It knows nothing of the target's KV cache, of acceptance, or of how far drafting pays. Source:
llama.cpp `src/models/dflash.cpp`; DeepSeek-V4-Flash-0731's model card.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gguf_mtp.drafters.draft_builder import DraftBuilder
from gguf_mtp.drafters.pending_rows import PendingRows
from gguf_mtp.drafters.spec import FLUSH, DrafterSpec, DraftParts
from gguf_mtp.errors import SavedStateError, UnsupportedModel
from gguf_mtp.gguf import model_facts, side_file, vocabularies
from gguf_mtp.gguf.arch import dflash
from gguf_mtp.gguf.arch.dflash import BlockShape
from gguf_mtp.types import Ask, Decoder, Draft, ModelFacts, Output, Rows

log = logging.getLogger(__name__)


class DsparkDrafter:
    """A `types.Drafter` over a context that drafts blocks; `n_seq` sequences.

    A decode holds at most `n_batch` rows. Between calls the cache holds rows of certain tokens
    only.
    """

    name = "dspark"
    is_free = False

    def __init__(self, context: Decoder, n_seq: int, n_batch: int, shape: BlockShape) -> None:
        self._context = context
        self._n_batch = n_batch
        self._shape = shape
        self._pending = [PendingRows() for _ in range(n_seq)]
        """The rows before `first` are in the cache."""

    def observe(self, rows: Sequence[Rows]) -> None:
        """Buffers what the target's layers read, in `Rows.hidden`; it is copied."""
        for r in rows:
            pending = self._pending[r.seq]
            pending.observe(r)
            while len(pending.tokens) > FLUSH:
                self._inject([(r.seq, FLUSH)])

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """One draft per ask, in order, of at most a block. Raises `DecodeError`; the caches then
        hold certain rows only."""
        runs = [DraftBuilder(ask) for ask in asks]
        active = [run for run in runs if run.wants_more]
        self._catch_up([run.ask.seq for run in active])
        most = max(self._n_batch // self._shape.size, 1)
        for i in range(0, len(active), most):
            self._draft(active[i : i + most])
        return [run.draft(self.name) for run in runs]

    def rewind(self, seq: int, n: int) -> None:
        """Keeps rows at positions < n - 1; the next row to observe is max(n - 1, 0)."""
        pending = self._pending[seq]
        keep = max(n - 1, 0)
        if keep < pending.first:
            self._context.rewind(seq, keep)
            pending.restart(keep)
        elif keep < pending.end:
            pending.keep(keep - pending.first)

    def copy(self, src: int, dst: int, n: int) -> None:
        """Makes `dst` start with the first `n` certain tokens of `src`, buffered rows included."""
        source = self._pending[src]
        self._context.copy(src, dst, min(source.first, n))
        self._pending[dst].become(source)
        self.rewind(dst, n)

    def save(self, seq: int) -> bytes:
        """The sequence's bytes: the cache, and the rows buffered for it."""
        return self._pending[seq].pack(self._context.save(seq))

    def load(self, seq: int, data: bytes) -> None:
        """Puts saved bytes in the place of what the sequence held; raises `SavedStateError`."""
        self._pending[seq].restart(0)
        saved, state = PendingRows.unpack(data)
        if saved.first != self._context.load(seq, state):
            self._context.rewind(seq, 0)
            raise SavedStateError("the saved rows do not follow those in the cache")
        self._pending[seq] = saved

    def _catch_up(self, seqs: Sequence[int]) -> None:
        """Every buffered row of these sequences goes into the cache, in as few decodes as hold
        them."""
        parts: list[tuple[int, int]] = []
        room = self._n_batch
        for seq in seqs:
            while len(self._pending[seq].tokens) > self._n_batch:
                self._inject([(seq, self._n_batch)])
            n = len(self._pending[seq].tokens)
            if n > room:
                self._inject(parts)
                parts, room = [], self._n_batch
            if n:
                parts.append((seq, n))
                room -= n
        self._inject(parts)

    def _inject(self, parts: Sequence[tuple[int, int]]) -> None:
        """The first n buffered rows of each (sequence, n)."""
        if not parts:
            return
        rows = []
        for seq, n in parts:
            pending = self._pending[seq]
            rows.append(Rows(seq, pending.first, pending.tokens[:n], 0, pending.rows(n)))
        self._context.decode(rows)
        for seq, n in parts:
            self._pending[seq].drop(n)

    def _draft(self, runs: Sequence[DraftBuilder]) -> None:
        """One block for each, whole ones alone: a shorter one in the batch would spoil the rest."""
        if not runs:
            return
        size, masks = self._shape.size, [self._shape.mask] * (self._shape.size - 1)
        rows = [
            Rows(run.ask.seq, self._pending[run.ask.seq].first, [run.ask.tokens[-1], *masks], size)
            for run in runs
        ]
        try:
            for run, output in zip(runs, self._context.decode(rows).outputs, strict=True):
                _take(run, output)
        finally:
            for run in runs:  # what was only guessed leaves the cache
                self._context.rewind(run.ask.seq, self._pending[run.ask.seq].first)


def _take(run: DraftBuilder, output: Output) -> None:
    assert output.hidden is not None
    for logits, hidden in zip(output.logits, output.hidden, strict=True):
        n = len(run.tokens)
        if run.wants_more:
            run.take(logits, sure=float(hidden[0]))
        if len(run.tokens) == n or run.tokens[-1] != int(np.argmax(logits)):
            return


# -- what the registry knows of it --------------------------------------------------------------


def _build(parts: DraftParts) -> DsparkDrafter:
    context = parts.block()
    shape = dflash.shape(context.file)
    assert shape
    return DsparkDrafter(context.decoder, parts.n_seq, context.n_batch, shape)


def _why_not(target: ModelFacts, side: ModelFacts | None) -> str | None:
    del target
    return None if side is not None else "there is no file with a DSpark drafter for it"


def _find(target: ModelFacts) -> ModelFacts | None:
    """The side file in the model's folder that belongs to it."""
    found, refusals = side_file.find(target, "dspark", _read)
    for refusal in refusals:
        log.warning("%s", refusal)
    if found is not None:
        log.info("drafting with %s, found next to the model", found.path)
    return found


def _claims(_target: ModelFacts, found: ModelFacts) -> bool:
    return dflash.shape(found) is not None


def _read(target: ModelFacts, path: Path) -> ModelFacts:
    """Embedding and head are the target's, so only shapes and the vocabulary tell whose it is."""
    side = model_facts.read_any(path)
    shape = dflash.shape(side)
    if shape is None:
        raise UnsupportedModel(f"{path} holds no DSpark drafter: {side.reason}")
    why = None
    if target.architecture != "deepseek4":
        why = f"it drafts for DeepSeek-V4, but the model is {target.architecture}"
    elif side.n_embd != target.n_embd:
        why = f"its embedding_length is {side.n_embd}, but the model's is {target.n_embd}"
    elif max(shape.layer_inputs) > target.n_layer:
        why = f"it reads layer {max(shape.layer_inputs)}, but the model has {target.n_layer}"
    why = why or vocabularies.why_not_one(target, side)
    if why is not None:
        raise UnsupportedModel(f"{path} does not belong to {target.path}: {why}")
    return side


SPEC = DrafterSpec(
    "dspark",
    "its DSpark drafter",
    _build,
    needs_block=True,
    why_not=_why_not,
    find=_find,
    claims=_claims,
    read=_read,
)
