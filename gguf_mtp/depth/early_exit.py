"""Whether thresholds on the draft's confidence beat a fixed depth just now, and which.

They are worth it where confidence tells hard tokens from easy ones and a row or a step is dear
enough to save; where confidence says nothing, the fixed depth is at least as good and keeps the
decode's shape. Weighed again every few rounds, for one typical sequence of the batch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from gguf_mtp.depth.confidence import EDGES, N_BINS, Calibration, best_cut, rate_under
from gguf_mtp.depth.goodput import StepCosts
from gguf_mtp.types import DraftLimit

_ENTER, _STAY = 1.02, 1.01  # thresholds must beat the fixed depth by this much
_FADE = 0.98  # of a sequence's mix of confidences with each draft token: it remembers fifty
_EVERY = 16  # choices between two looks; the first ones come sooner
_OPEN_EVERY = 32  # rounds between drafts without thresholds, which keep the calibration honest


class ExitRule(NamedTuple):
    """Thresholds for positions 0.. and what they promise over the best fixed depth."""

    p_min: tuple[float, ...]
    gain: float


class ExitOutlook(NamedTuple):
    """What the decision needs to know: acceptance at the first position, the best fixed depth, the
    deepest depth whose cost is known, prices for one sequence, and seconds to rebuild a graph."""

    seq: int
    first: float
    fixed: int
    deepest: int
    prices: StepCosts
    rebuild: float


class EarlyExit:
    """Thresholds in use (`stop`, or None), over a calibration that all sequences feed.

    How confident the drafter is differs from text to text far more than what its confidence is
    worth, so each sequence has its own mix of confidences."""

    def __init__(self, n_max: int, floor: float, least: int) -> None:
        self.calibration = Calibration(n_max)
        self.stop: ExitRule | None = None
        self._floor = floor
        self._least = max(least, 1)
        self._n_max = n_max
        self._own: dict[int, list[list[float]]] = {}
        self._wait = 2
        self._until_look = 0
        self._until_open = _OPEN_EVERY

    @property
    def gain(self) -> float:
        """What the thresholds in use promise over the best fixed depth; 1 without."""
        return self.stop.gain if self.stop else 1.0

    def forget(self, seq: int) -> None:
        """The sequence has ended; what follows may be another kind of text."""
        self._own.pop(seq, None)
        self._wait = self._until_look = 2

    def look(self, outlook: ExitOutlook) -> None:
        """Weigh thresholds against the best fixed depth, when it is time to."""
        self._until_look -= 1
        if self._until_look > 0 or not self.calibration.is_ready or outlook.deepest < 1:
            return
        self._wait = min(2 * self._wait, _EVERY)
        self._until_look = self._wait
        own = self._own.get(outlook.seq, ())
        table = self.calibration.table(max(outlook.deepest, outlook.fixed), outlook.first, own)
        cut, rate = best_cut(table, outlook.prices, outlook.rebuild, self._least)
        open_ = rate_under(table, [0] * outlook.fixed, outlook.prices, 0.0)
        gain = rate / open_
        if not any(cut) or gain < (_STAY if self.stop else _ENTER):
            self.stop = None
        else:
            self.stop = ExitRule(tuple(EDGES[i - 1] if i else 0.0 for i in cut), gain)

    def limit(self, n: int) -> DraftLimit:
        """A draft of at most `n` tokens under no thresholds but the user's."""
        return DraftLimit(n, (self._floor,) * n if self._floor else ())

    def stopped(self, room: int) -> DraftLimit | None:
        """The limit under thresholds, or None when a fixed depth is to be used."""
        if self.stop is None or room < self._least:
            return None
        self._until_open -= 1
        if self._until_open <= 0:
            self._until_open = _OPEN_EVERY
            return None
        p_min = self.stop.p_min[:room]
        return DraftLimit(len(p_min), tuple(max(p, self._floor) for p in p_min))

    def observe(
        self, seq: int, limit: DraftLimit, confidence: Sequence[float], verdicts: list[float]
    ) -> int:
        """Learn from a draft; `verdicts` (1 accepted, 0 not) of its judged tokens gain an inferred
        one where the draft was cut. Returns how many draft steps it took."""
        n, n_judged = len(confidence), len(verdicts)
        n_accepted = int(sum(verdicts))
        self.calibration.observe(confidence, n_accepted, n_judged)
        own = self._own.setdefault(seq, [[0.0] * N_BINS for _ in range(self._n_max)])
        for j, value in enumerate(confidence):
            b = bisect_right(EDGES, value)
            own[j] = [_FADE * one + (i == b) for i, one in enumerate(own[j])]
        if n >= limit.n or n >= len(limit.p_min) or limit.p_min[n] <= 0:
            return n
        below = self.calibration.shares_below(n, limit.p_min[n])
        inferred = self.calibration.observe_cut(n, below)
        own[n] = [_FADE * one + share for one, share in zip(own[n], below, strict=True)]
        if n_accepted == n:
            verdicts.append(inferred)
        return n + 1
