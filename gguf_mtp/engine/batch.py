"""One round's target decode: what goes in, and what came of it.

Knows no decoder and no drafter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gguf_mtp.engine.request import Outcome, SequenceStep
from gguf_mtp.types import Output, Rows, Step

__all__ = ["Batch", "certain_rows"]


class Batch:
    """`steps` are the sequences that get tokens in this round; `prompts` are rows of prompts that
    are read on and not to their end.

    After `judge`, `outputs` has an entry for each step, and `judged` pairs each with its outcome.
    """

    def __init__(self, steps: Sequence[SequenceStep], prompts: Sequence[Rows]) -> None:
        self.steps, self.prompts = steps, prompts
        self.rows = [*(step.rows() for step in steps), *prompts]
        self.judged: list[tuple[SequenceStep, Outcome]] = []
        self.outputs: Sequence[Output] = ()
        self._read: Sequence[Output] = ()

    @property
    def n_prefill(self) -> dict[int, int]:
        """How many rows of its prompt each sequence reads in this round, for those that do."""
        rows = {r.seq: len(r.tokens) for r in self.prompts}
        return rows | {s.seq: s.n_prompt for s in self.steps if s.n_prompt}

    def judge(self, decoded: Step, end_tokens: frozenset[int]) -> None:
        """Verifies every step's draft against what the target computed."""
        n = len(self.steps)
        self.outputs, self._read = decoded.outputs[:n], decoded.outputs[n:]
        self.judged = [
            (step, step.judge(output.logits, end_tokens))
            for step, output in zip(self.steps, self.outputs, strict=True)
        ]

    def prompts_read(self) -> Iterator[Rows]:
        """The rows of `prompts`, which are certain, with their hidden rows."""
        for rows, output in zip(self.prompts, self._read, strict=True):
            yield certain_rows(rows, output)


def certain_rows(rows: Rows, output: Output) -> Rows:
    """`rows` with the hidden rows the target computed for them, of which `output` may hold more."""
    hidden = None if output.hidden is None else output.hidden[: len(rows.tokens)]
    return Rows(rows.seq, rows.pos, rows.tokens, 0, hidden)
