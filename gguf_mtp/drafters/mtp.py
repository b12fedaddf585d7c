"""Drafting with the model's own Multi-Token-Prediction block.

MTP row p + 1 is the pair (hidden row p of the target, token p + 1); it predicts token p + 2. The
rows of certain tokens are only buffered when the target has decoded them; `propose` decodes the
buffered rows of all sequences in one batch, whose last output per sequence is the first draft
token, and chains the block's own hidden row for the further ones. So a draft of N tokens costs N
decodes, and a sequence that does not draft costs one decode per `FLUSH` rows.

It knows nothing of the target's KV cache, of acceptance, or of how far drafting pays. Source:
DeepSeek-V3 report (arXiv 2412.19437, section 2.2); llama.cpp `src/models/deepseek2.cpp`, graph_mtp.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from gguf_mtp.drafters.draft_builder import DraftBuilder
from gguf_mtp.drafters.pending_rows import PendingRows
from gguf_mtp.drafters.spec import FLUSH, DrafterSpec, DraftParts
from gguf_mtp.errors import SavedStateError, UnsupportedModel
from gguf_mtp.gguf import model_facts, side_file
from gguf_mtp.types import Ask, Decoder, Draft, Floats, ModelFacts, Output, Rows

log = logging.getLogger(__name__)


class MtpDrafter:
    """A `types.Drafter` over a context that runs the MTP block; `n_seq` sequences.

    A decode holds at most `n_batch` rows.
    """

    name = "mtp"
    is_free = False

    def __init__(self, context: Decoder, n_seq: int, n_batch: int) -> None:
        self._context = context
        self._n_batch = n_batch
        self._pending = [PendingRows() for _ in range(n_seq)]
        """The MTP rows before `first + 1` are in the cache; the hidden row i pairs with
        `tokens[i + 1]`, which for the newest row is not known yet."""

    def observe(self, rows: Sequence[Rows]) -> None:
        """Buffers the target's hidden rows; they are copied."""
        for r in rows:
            pending = self._pending[r.seq]
            pending.observe(r)
            while len(pending.tokens) > FLUSH:
                self._flush(r.seq, FLUSH, pending.tokens[FLUSH])

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """One draft per ask, in order. Raises `DecodeError`; the caches then hold certain rows
        only."""
        runs = [DraftBuilder(ask) for ask in asks]
        active = [r for r in runs if r.wants_more and self._has_rows(r.ask.seq)]
        outputs = self._catch_up(active)
        try:
            while active:
                for run, output in zip(active, outputs, strict=True):
                    run.take(output.logits[-1])
                active, hidden = _still_drafting(active, outputs)
                if active:
                    outputs = self._chain(active, hidden)
        finally:
            for run in runs:  # what was only guessed leaves the cache
                self._context.rewind(run.ask.seq, self._pending[run.ask.seq].first + 1)
        return [run.draft(self.name) for run in runs]

    def rewind(self, seq: int, n: int) -> None:
        """Keeps MTP rows at positions < n; the next row to observe is max(n - 1, 0)."""
        pending = self._pending[seq]
        keep = max(n - 1, 0)
        if keep < pending.first:
            self._context.rewind(seq, keep + 1 if keep else 0)
            pending.restart(keep)
        elif keep < pending.end:
            pending.keep(keep - pending.first)

    def copy(self, src: int, dst: int, n: int) -> None:
        """Makes `dst` start with the first `n` certain tokens of `src`, buffered rows included."""
        source, target = self._pending[src], self._pending[dst]
        self._context.copy(src, dst, min(source.first + 1, n))
        target.become(source)
        self.rewind(dst, n)

    def save(self, seq: int) -> bytes:
        """The sequence's bytes: the cache, and the rows buffered for it."""
        self._settle(seq)
        return self._pending[seq].pack(self._context.save(seq))

    def load(self, seq: int, data: bytes) -> None:
        """Puts saved bytes in the place of what the sequence held; raises `SavedStateError`."""
        self._pending[seq].restart(0)
        saved, state = PendingRows.unpack(data)
        n_past = self._context.load(seq, state)
        if saved.first != max(n_past - 1, 0):
            self._context.rewind(seq, 0)
            raise SavedStateError("the saved rows do not follow those in the cache")
        self._pending[seq] = saved

    def _has_rows(self, seq: int) -> bool:
        """Whether there is a row to draft from; one already decoded is taken out of the cache."""
        self._settle(seq)
        return bool(self._pending[seq].tokens)

    def _settle(self, seq: int) -> None:
        """Makes sure that the newest certain row is buffered, not in the cache, if it is known."""
        pending = self._pending[seq]
        pending.put_back()
        self._context.rewind(seq, pending.first + 1)

    def _catch_up(self, active: Sequence[DraftBuilder]) -> Sequence[Output]:
        """Decodes every buffered row of these sequences; the last of each gives an output."""
        if not active:
            return []
        room = self._n_batch // len(active)  # rows that do not fit one batch go first
        for run in active:
            while len(self._pending[run.ask.seq].tokens) > room:
                self._flush(run.ask.seq, room, self._pending[run.ask.seq].tokens[room])
        rows = [
            self._rows(run.ask.seq, len(self._pending[run.ask.seq].tokens), run.ask.tokens[-1], 1)
            for run in active
        ]
        outputs = self._context.decode(rows).outputs
        for run in active:  # these rows are in the cache now
            pending = self._pending[run.ask.seq]
            pending.drop(len(pending.tokens))
        return outputs

    def _chain(self, active: Sequence[DraftBuilder], hidden: Sequence[Floats]) -> Sequence[Output]:
        """One more row per sequence: its newest draft token with the block's own hidden row."""
        rows = [
            Rows(run.ask.seq, self._context.n_past(run.ask.seq), run.tokens[-1:], 1, h)
            for run, h in zip(active, hidden, strict=True)
        ]
        return self._context.decode(rows).outputs

    def _flush(self, seq: int, n: int, next_token: int) -> None:
        self._context.decode([self._rows(seq, n, next_token, 0)])
        self._pending[seq].drop(n)

    def _rows(self, seq: int, n: int, next_token: int, n_outputs: int) -> Rows:
        """The first `n` buffered rows as MTP rows; `next_token` follows the n-th."""
        pending = self._pending[seq]
        tokens = [*pending.tokens[1:n], next_token]
        return Rows(seq, pending.first + 1, tokens, n_outputs, pending.rows(n))


def _still_drafting(
    active: Sequence[DraftBuilder], outputs: Sequence[Output]
) -> tuple[list[DraftBuilder], list[Floats]]:
    """The runs that want a further token, each with a copy of the hidden row it goes on from."""
    going = [(r, o) for r, o in zip(active, outputs, strict=True) if r.wants_more]
    hidden = [o.hidden[-1:].copy() for _, o in going if o.hidden is not None]
    return [r for r, _ in going], hidden


# -- what the registry knows of it --------------------------------------------------------------


def _build(parts: DraftParts) -> MtpDrafter:
    context = parts.block()
    return MtpDrafter(context.decoder, parts.n_seq, context.n_batch)


def _why_not(target: ModelFacts, side: ModelFacts | None) -> str | None:
    return None if side is not None or target.can_draft else target.reason


def _refuse_broken(target: ModelFacts) -> None:
    """A block that would make llama.cpp abort: the file is not what its owner takes it for."""
    if target.n_mtp and target.architecture in model_facts.ARCHITECTURES:
        raise UnsupportedModel(
            f"{target.path} cannot draft: {target.reason}; use --draft off or --draft ngram to run "
            "it without its MTP block"
        )


def _find(target: ModelFacts) -> ModelFacts | None:
    """The side file in the model's folder that belongs to it."""
    found, refusals = side_file.find(target)
    for refusal in refusals:
        log.warning("%s", refusal)
    if found is not None:
        log.info("drafting with %s, found next to the model", found.path)
    return found


def _claims(target: ModelFacts, found: ModelFacts) -> bool:
    """Whether a file is an MTP block of the target's, alone or in a whole file."""
    if found.n_mtp and model_facts.is_side_file(found):
        return True
    if not found.can_draft:
        return False
    try:
        side_file.check(target, found)
    except UnsupportedModel:
        return False
    return True


def _read(target: ModelFacts, path: Path) -> ModelFacts:
    side = side_file.read(path)
    for remark in side_file.check(target, side):
        log.info("%s", remark)
    return side


SPEC = DrafterSpec(
    "mtp",
    "its MTP block",
    _build,
    needs_block=True,
    why_not=_why_not,
    refuses=_refuse_broken,
    find=_find,
    claims=_claims,
    read=_read,
)
