"""Drafting with a smaller model that has the target's vocabulary, in a context of its own.

Its rows are tokens, as the target's are: nothing is buffered, for what its cache lacks of a
sequence it reads from the next `Ask`, in one batch with the row of the first draft token. So a
draft of N tokens costs N decodes, and a sequence that never drafts costs nothing.

It knows nothing of the target, of acceptance, or of how far drafting pays. Source: speculative
sampling (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gguf_mtp.drafters.draft_builder import DraftBuilder
from gguf_mtp.drafters.spec import DrafterSpec, DraftParts
from gguf_mtp.errors import UnsupportedModel
from gguf_mtp.gguf import cache_layout, model_facts, vocabularies
from gguf_mtp.types import Ask, Decoder, Draft, ModelFacts, Output, Rows


class ModelDrafter:
    """A `types.Drafter` over a context of the draft model; a decode holds at most `n_batch` rows.

    Between calls its cache holds rows of certain tokens only.
    """

    name = "model"
    is_free = False

    def __init__(self, context: Decoder, n_batch: int) -> None:
        self._context = context
        self._n_batch = n_batch

    def observe(self, rows: Sequence[Rows]) -> None:
        """Nothing: an `Ask` brings all tokens."""

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """One draft per ask, in order. Raises `DecodeError`; the cache then holds certain rows
        only."""
        runs = [DraftBuilder(ask) for ask in asks]
        active = [run for run in runs if run.wants_more]
        try:
            outputs = self._catch_up(active)
            while active:
                for run, output in zip(active, outputs, strict=True):
                    run.take(output.logits[-1])
                active = [run for run in active if run.wants_more]
                if active:
                    outputs = self._decode([(run, run.tokens[-1:], 1) for run in active])
        finally:
            for run in runs:  # what was only guessed leaves the cache
                self._context.rewind(run.ask.seq, len(run.ask.tokens))
        return [run.draft(self.name) for run in runs]

    def rewind(self, seq: int, n: int) -> None:
        """Keeps the rows of the first `n` tokens."""
        self._context.rewind(seq, n)

    def copy(self, src: int, dst: int, n: int) -> None:
        """Makes `dst` start with the rows of `src`'s first `n` tokens, as far as they are there."""
        self._context.copy(src, dst, min(n, self._context.n_past(src)))

    def save(self, seq: int) -> bytes:
        """The cache's bytes."""
        return self._context.save(seq)

    def load(self, seq: int, data: bytes) -> None:
        """Puts saved bytes in the place of what the sequence held; raises `SavedStateError`."""
        self._context.load(seq, data)

    def _catch_up(self, active: Sequence[DraftBuilder]) -> Sequence[Output]:
        """Decodes every token not in the cache, the last one of each sequence in any case."""
        if not active:
            return []
        room = self._n_batch // len(active)  # rows that do not fit one batch go first
        for run in active:
            seq, n = run.ask.seq, len(run.ask.tokens)
            self._context.rewind(seq, n - 1)
            while n - self._context.n_past(seq) > room:
                at = self._context.n_past(seq)
                more = min(self._n_batch, n - 1 - at)
                self._decode([(run, run.ask.tokens[at : at + more], 0)])
        return self._decode(
            [(run, run.ask.tokens[self._context.n_past(run.ask.seq) :], 1) for run in active]
        )

    def _decode(self, parts: Sequence[tuple[DraftBuilder, Sequence[int], int]]) -> Sequence[Output]:
        """Decodes tokens that follow the cache; the number of outputs goes with each part."""
        rows = [
            Rows(run.ask.seq, self._context.n_past(run.ask.seq), tokens, n_outputs)
            for run, tokens, n_outputs in parts
        ]
        return self._context.decode(rows).outputs


# -- what the registry knows of it --------------------------------------------------------------


def _build(parts: DraftParts) -> ModelDrafter:
    context = parts.model()
    return ModelDrafter(context.decoder, context.n_batch)


def _why_not(_target: ModelFacts, file: ModelFacts | None) -> str | None:
    return None if file else "there is no draft model: name one with --draft-model"


def _read(target: ModelFacts, path: Path) -> ModelFacts:
    found = model_facts.read_any(path)
    if model_facts.is_side_file(found):
        raise UnsupportedModel(f"{path} cannot be a draft model: it holds only an MTP block")
    if cache_layout.is_recurrent(found.architecture):
        raise UnsupportedModel(
            f"{path} cannot be a draft model: it has recurrent layers, and their cache cannot drop "
            "tokens that were drafted one at a time"
        )
    why = vocabularies.why_not_one(target, found)
    if why is not None:
        raise UnsupportedModel(f"{path} cannot draft for {target.path}: {why}")
    return found


SPEC = DrafterSpec(
    "model",
    "a draft model",
    _build,
    needs_model=True,
    why_not=_why_not,
    read=_read,
)
