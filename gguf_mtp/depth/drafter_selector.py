"""Which of several drafters leads, where each takes time: the one that promises most.

A drafter that does not active shows nothing of itself, so each is given a trial at first, and later
on, ever less often, when it may well have become the better one.
"""

from __future__ import annotations

from collections.abc import Sequence

from gguf_mtp.depth.drafter_controller import DrafterController
from gguf_mtp.depth.probing import HYSTERESIS

_TRIAL = 16  # rounds
_FIRST_WAIT, _LAST_WAIT = 64, 4096  # rounds until the next trial, doubled when it was lost
_EVERY = 8  # rounds between two comparisons


class DrafterSelector:
    """Keeps the active from round to round."""

    def __init__(self) -> None:
        self._active: DrafterController | None = None
        self._on_trial: DrafterController | None = None
        self._left = 0  # rounds until the next comparison
        self._now = 0
        self._wait: dict[str, int] = {}
        self._next: dict[str, int] = {}  # round of the next trial

    def winner(
        self,
        candidates: Sequence[DrafterController],
        seqs: Sequence[int],
        requests: Sequence[Sequence[int]],
    ) -> int:
        """The index of the candidate that drafts now; `requests[i]` is the i-th one's room in each
        sequence. The first of them leads before anything is known."""
        self._now += 1
        self._left -= 1
        now = self._on_trial or self._active
        if now is not None and self._left > 0:
            at = next((i for i, one in enumerate(candidates) if one is now), None)
            if at is not None:
                return at
        return self._compare(candidates, seqs, requests)

    def skip(self, n_rounds: int) -> None:
        """So many rounds have passed in which nobody drafted."""
        self._now += n_rounds
        self._left -= n_rounds

    def _compare(
        self,
        candidates: Sequence[DrafterController],
        seqs: Sequence[int],
        requests: Sequence[Sequence[int]],
    ) -> int:
        means = [one.estimate(seqs, room) for one, room in zip(candidates, requests, strict=True)]
        rates = [max(mean.rates) for mean in means]
        at = next((i for i, one in enumerate(candidates) if one is self._active), 0)
        best = max(range(len(rates)), key=lambda i: (rates[i], -i))
        if self._on_trial is not None:
            self._book(self._on_trial, won=candidates[best] is self._on_trial)
            self._on_trial = None
        known = candidates[best].draft.n > 0
        if known and rates[best] > HYSTERESIS * rates[at]:
            at = best
        self._active, self._left = candidates[at], _EVERY
        for i, one in enumerate(candidates):
            if i != at and self._now >= self._next.get(one.name, _FIRST_WAIT):
                self._on_trial, self._left = one, _TRIAL
                return i
        return at

    def _book(self, one: DrafterController, won: bool) -> None:
        wait = _FIRST_WAIT if won else min(2 * self._wait.get(one.name, _FIRST_WAIT), _LAST_WAIT)
        self._wait[one.name] = wait
        self._next[one.name] = self._now + wait
