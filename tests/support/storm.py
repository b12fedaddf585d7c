"""Random requests, rounds, cancellations and restores against one engine, invariants checked.

Whatever happens in whatever order: caches hold exactly what is certain, and every answer is the one
the same prompt gets alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from gguf_mtp.drafters.draft_model import ModelDrafter
from gguf_mtp.drafters.dspark import DsparkDrafter
from gguf_mtp.drafters.mtp import MtpDrafter
from gguf_mtp.drafters.ngram import NgramDrafter
from gguf_mtp.engine.engine import Engine
from gguf_mtp.errors import SavedStateError
from gguf_mtp.params import SamplingParams

GREEDY = SamplingParams(temperature=0)


class Storm:
    """`alone(prompt, n)` is what the engine should answer; `prompt(rng)` makes one."""

    def __init__(
        self,
        engine: Engine,
        alone: Callable[[Sequence[int], int], list[int]],
        prompt: Callable[[random.Random], list[int]],
        seed: int,
    ) -> None:
        self.engine, self.alone, self.make_prompt = engine, alone, prompt
        self.random = random.Random(seed)
        self.asked: dict[int, tuple[list[int], int]] = {}
        self.answers: dict[int, list[int]] = {}
        self.told: list[list[int]] = []  # prompts and their answers, to go on with
        self.n_finished = 0

    def run(self, n_steps: int) -> None:
        actions = [self.submit, self.step, self.step, self.step, self.cancel, self.restore]
        for _ in range(n_steps):
            self.random.choice(actions)()
            self.check()
        while not self.engine.is_idle:
            self.step()
            self.check()

    def submit(self) -> None:
        if len(self.asked) >= 2 * self.engine.limits.n_seq:
            return
        prompt = self.make_prompt(self.random)
        if self.told and self.random.random() < 0.5:  # a conversation goes on, or branches
            told = self.random.choice(self.told)
            prompt = told[: self.random.randint(1, len(told))] + prompt[-3:]
        n = self.random.choice([1, 2, 5, 12])
        prompt = prompt[: self.engine.limits.n_ctx - n]
        id_ = self.engine.submit(prompt, GREEDY, n)
        self.asked[id_], self.answers[id_] = (prompt, n), []

    def step(self) -> None:
        for chunk in self.engine.step():
            self.answers[chunk.seq] += chunk.tokens
            if chunk.finish_reason:
                self.finish(chunk.seq, whole=True)

    def cancel(self) -> None:
        if self.asked and self.random.random() < 0.3:
            id_ = self.random.choice(list(self.asked))
            assert self.engine.cancel(id_) is not None
            self.finish(id_, whole=False)

    def restore(self) -> None:
        if not self.told or self.random.random() < 0.8:
            return
        try:
            data = self.engine.save(self.random.choice(self.told))
        except SavedStateError:
            return  # evicted, or still in use
        if any(not slot.request for slot in self.engine._slots._slots):
            self.engine.restore(data)

    def finish(self, id_: int, whole: bool) -> None:
        (prompt, n), answer = self.asked.pop(id_), self.answers.pop(id_)
        expected = self.alone(prompt, n)
        assert answer == (expected if whole else expected[: len(answer)])
        self.told.append([*prompt, *answer])
        del self.told[:-8]
        self.n_finished += 1

    def check(self) -> None:
        slots = self.engine._slots
        for slot in slots._slots:
            n_past = slots._target.n_past(slot.seq)
            if slot.request is None or slots.is_read(slot):
                last = max(len(slot.tokens) - 1, 0)
                whole = [] if slot.request else [len(slot.tokens)]  # an answer that has ended
                assert n_past in (last, *whole), "target rows"
            self.check_drafters(slot.seq, n_past)

    def check_drafters(self, seq: int, n_rows: int) -> None:
        """Each has seen exactly what is certain, and holds nothing else."""
        drafting = self.engine.drafting
        mtp, ngram, model = (drafting.drafter(name) for name in ("mtp", "ngram", "model"))
        dspark = drafting.drafter("dspark")
        if isinstance(dspark, DsparkDrafter):
            pending = dspark._pending[seq]
            assert pending.end == n_rows, "rows of layers"
            assert dspark._context.n_past(seq) == pending.first, "rows in the stages' cache"
        if isinstance(mtp, MtpDrafter):
            pending = mtp._pending[seq]
            assert pending.end == n_rows, "drafter rows"
            assert mtp._context.n_past(seq) in (0, pending.first + 1), "MTP rows"
        if isinstance(ngram, NgramDrafter):
            assert len(ngram._indices[seq].tokens) == n_rows, "indexed tokens"
        if isinstance(model, ModelDrafter):
            assert model._context.n_past(seq) <= n_rows + 1, "draft model rows"
