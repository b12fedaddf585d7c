"""The drafters of an engine: who is asked for which sequence, and what is left when one fails.

Free drafters are asked first, for every sequence; the depth decision sees what they offer and
says who drafts how far. Towards the slots all drafters are one. Knows no drafter by name, and
neither costs nor acceptance.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from gguf_mtp.depth.protocol import Depth, DraftRequest, FreeDraft
from gguf_mtp.engine.observers import Fallback, Observers
from gguf_mtp.engine.request import NO_DRAFT, Outcome, RoundTimes, SequenceStep, feedback_of
from gguf_mtp.engine.skip_rounds import SkipRounds
from gguf_mtp.errors import CannotRewind, DecodeError, SavedStateError
from gguf_mtp.types import Ask, Draft, Drafter, DraftLimit, Rows

log = logging.getLogger(__name__)
T = TypeVar("T")


class Drafting:
    """Drafters in order of preference. One that fails is left out from then on, and `observers`
    are told; the others go on.

    `stopped` says why, once none is left of those there were.
    """

    def __init__(self, drafters: Sequence[Drafter], observers: Observers) -> None:
        self.stopped: str | None = None
        self._drafters = list(drafters)
        self._observers = observers
        self.seconds_of: dict[str, float] = {}  # spent in this round, by drafter
        self._skip_rounds = SkipRounds()
        self._is_skipping = False
        self._deciding_s = 0.0

    @property
    def names(self) -> tuple[str, ...]:
        """Of the drafters that work."""
        return tuple([d.name for d in self._drafters])

    def drafter(self, name: str) -> Drafter | None:
        """The drafter of that name while it works."""
        return next((d for d in self._drafters if d.name == name), None)

    # -- a round ---------------------------------------------------------------------------------

    def draft(self, steps: Sequence[SequenceStep], depth: Depth) -> None:
        """Gives every step its limit and its draft, maybe an empty one."""
        self.seconds_of = {}
        if not self._drafters or depth.n_max == 0 or not steps:
            return
        self._is_skipping = self._skip_rounds.skips(steps)
        if self._is_skipping:
            return
        start = time.perf_counter()
        for drafter in self._drafters:
            if drafter.is_free:
                self._make_free_draft(drafter, steps, depth.n_max_free)
        limits = depth.choose([self._room(step) for step in steps])
        asked: dict[str, list[tuple[SequenceStep, DraftLimit]]] = {}
        for step, limit in zip(steps, limits, strict=True):
            step.limit = limit
            if limit.n and limit.source == step.free_draft.source:
                step.draft = _first(step.free_draft, limit.n)
            elif limit.n:
                asked.setdefault(limit.source, []).append((step, limit))
        self._deciding_s = time.perf_counter() - start
        for drafter in list(self._drafters):
            if drafter.name in asked:
                self._propose(drafter, asked[drafter.name])

    def observe(self, rows: Sequence[Rows]) -> None:
        """Shows every drafter what has become certain."""
        seen = [r for r in rows if r.tokens]
        for drafter in list(self._drafters):
            self._run(drafter, partial(drafter.observe, seen))

    def learn(
        self,
        depth: Depth,
        judged: Sequence[tuple[SequenceStep, Outcome]],
        n_prefill: int,
        times: RoundTimes,
        seconds: float,
    ) -> None:
        """Tells the depth decision of a round, and leaves out whom it has given up."""
        if not self._drafters or depth.n_max == 0 or not judged:
            return
        if self._is_skipping and not n_prefill:
            self._skip_rounds.update(times, seconds)
            return
        start = time.perf_counter()
        depth.record(feedback_of(judged, n_prefill, times, seconds, self._skip_rounds.take()))
        cost_s = self._deciding_s + time.perf_counter() - start
        if n_prefill or self._is_skipping:  # the next decode has another shape
            self._skip_rounds.end()
        else:
            self._skip_rounds.begin([t for t, _ in judged], depth.n_skip, cost_s, seconds)
        for name, why in depth.given_up.items():
            drafter = self.drafter(name)
            if drafter is not None:
                self._stop(drafter, "never_accepted", why)

    def _room(self, step: SequenceStep) -> DraftRequest:
        free_draft = step.free_draft
        names = [  # a free drafter only with what it has offered
            d.name
            for d in self._drafters
            if _may(step, d) and (not d.is_free or d.name == free_draft.source)
        ]
        made = FreeDraft(free_draft.source, free_draft.confidence) if free_draft.tokens else None
        return DraftRequest(step.seq, step.request.n_draft_max() if names else 0, names, made)

    def _make_free_draft(self, drafter: Drafter, steps: Sequence[SequenceStep], n_max: int) -> None:
        """Asks a free drafter for every step that has no free draft yet."""
        asking, asks = [], []
        for step in steps:
            n = min(step.request.n_draft_max(), n_max)
            if n > 0 and not step.free_draft.tokens and _may(step, drafter):
                asking.append(step)
                asks.append(Ask(step.seq, step.slot.tokens, DraftLimit(n), step.request.chain))
        drafts = self._run(drafter, partial(drafter.propose, asks)) or [NO_DRAFT] * len(asks)
        for step, draft in zip(asking, drafts, strict=True):
            if draft.tokens:
                step.free_draft = draft

    def _propose(self, drafter: Drafter, asking: Sequence[tuple[SequenceStep, DraftLimit]]) -> None:
        asks = [Ask(t.seq, t.slot.tokens, limit, t.request.chain) for t, limit in asking]
        drafts = self._run(drafter, partial(drafter.propose, asks)) or [NO_DRAFT] * len(asks)
        for (step, _), draft in zip(asking, drafts, strict=True):
            step.draft = draft

    # -- the caches of all -----------------------------------------------------------------------

    def rewind(self, seq: int, n: int) -> None:
        """As `Drafter.rewind`, of every drafter; so are the next three."""
        for drafter in list(self._drafters):
            self._run(drafter, partial(drafter.rewind, seq, n))

    def copy(self, src: int, dst: int, n: int) -> None:
        for drafter in list(self._drafters):
            self._run(drafter, partial(drafter.copy, src, dst, n))

    def save(self, seq: int) -> dict[str, bytes]:
        """The bytes of each drafter, by its name."""
        return {d.name: d.save(seq) for d in self._drafters}

    def load(self, seq: int, parts: Mapping[str, bytes]) -> None:
        """Raises `SavedStateError` when one of them refuses, or works here but had stopped when the
        sequence was saved. What was saved of a drafter that has stopped here is not needed."""
        for drafter in self._drafters:
            if drafter.name not in parts:
                raise SavedStateError(
                    f"the sequence was saved after the drafter {drafter.name} had stopped, so it "
                    f"cannot be restored where {drafter.name} drafts"
                )
            drafter.load(seq, parts[drafter.name])

    # -- failures --------------------------------------------------------------------------------

    def _run(self, drafter: Drafter, work: Callable[[], T]) -> T | None:
        """What `work` returns; None when the drafter failed, which ends its drafting."""
        start = time.perf_counter()
        try:
            return work()
        except (DecodeError, CannotRewind) as error:
            self._stop(drafter, "drafter_failed", f"the drafter failed: {error}")
            return None
        finally:
            spent = time.perf_counter() - start
            self.seconds_of[drafter.name] = self.seconds_of.get(drafter.name, 0.0) + spent

    def _stop(self, drafter: Drafter, kind: Fallback, why: str) -> None:
        self._drafters.remove(drafter)
        if self._drafters:
            log.warning("drafter %s is disabled: %s", drafter.name, why)
        else:
            log.warning("drafting is now off: %s", why)
            self.stopped = why
        self._observers.fell_back(kind, why)


def _may(step: SequenceStep, drafter: Drafter) -> bool:
    """Whether the request allows the drafter."""
    allowed = step.request.options.draft
    return allowed is None or drafter.name in allowed


def _first(draft: Draft, n: int) -> Draft:
    return Draft(draft.tokens[:n], draft.probs[:n], draft.confidence[:n], draft.source)
