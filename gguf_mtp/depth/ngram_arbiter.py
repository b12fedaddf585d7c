"""Drafts that cost nothing to make: how often they come true, and when to send them.

A draft by lookup is in hand before anything is decided, and it is compared with what the answer
became whether the target saw it or not: so its acceptance is known at any time without a probe. It
is sent where it promises more tokens per second than what would be done otherwise.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from gguf_mtp.depth.confidence import EDGES, Calibration
from gguf_mtp.depth.cost_model import TargetCost
from gguf_mtp.depth.goodput import Depths, GoodputEstimate
from gguf_mtp.depth.options import DepthOptions
from gguf_mtp.depth.probing import HYSTERESIS
from gguf_mtp.depth.protocol import DraftRequest, DraftResult
from gguf_mtp.types import DraftLimit

FREE_DRAFT = "free draft"
"""The reason of a limit that a free draft was given."""

_MEMORY = 24.0  # judged tokens of a sequence that say how far to trust its free drafts
_TRUST_WEIGHT = 4.0  # of the promise itself, in tokens
_MOST_TRUST = 1.3
_MOST = 0.99
_EVERY = 16  # judged free drafts between two looks at the calibration
_YOUNG = 8  # samples of a row count until which its time is taken as low as it may well be


class FreeDraftAcceptance:
    """Acceptance of one free drafter's tokens: by position and confidence, shared by all sequences,
    times what each sequence has shown against that."""

    def __init__(self, n_max: int) -> None:
        self.calibration = Calibration(n_max)
        self._rates: list[list[float]] = []
        self._until_look = 0
        self._shown: dict[int, tuple[float, float]] = {}  # accepted and promised tokens

    def acceptance(self, seq: int, confidence: Sequence[float]) -> list[float]:
        """Of each token of a free draft, given the ones before it."""
        hits, promised = self._shown.get(seq, (0.0, 0.0))
        trust = min((hits + _TRUST_WEIGHT) / (promised + _TRUST_WEIGHT), _MOST_TRUST)
        return [min(trust * rate, _MOST) for rate in self._promises(confidence)]

    def judge(self, one: DraftResult) -> None:
        """Learn what became of an free_draft."""
        promises = self._promises(one.confidence[: one.n_judged])
        hits, promised = self._shown.get(one.seq, (0.0, 0.0))
        keep = max(1 - one.n_judged / _MEMORY, 0.0)
        self._shown[one.seq] = (keep * hits + one.n_accepted, keep * promised + sum(promises))
        self.calibration.observe(one.confidence, one.n_accepted, one.n_judged)
        self._until_look -= 1

    def forget(self, seq: int) -> None:
        self._shown.pop(seq, None)

    def by_position(self) -> tuple[float, ...]:
        """Acceptance of the positions that were judged."""
        hits, seen = self.calibration.hits, self.calibration.seen
        return tuple(sum(h) / sum(s) for h, s in zip(hits, seen, strict=True) if sum(s) > 0)

    def _promises(self, confidence: Sequence[float]) -> list[float]:
        if self._until_look <= 0:
            self._rates, self._until_look = self.calibration.rates(), _EVERY
        pairs = zip(self._rates, confidence, strict=False)
        return [rates[bisect_right(EDGES, sure)] for rates, sure in pairs]


class Baseline(NamedTuple):
    """What would be done without free drafts: `depths` by a drafter that takes time, expected to
    give `rate` tokens per second; `mean` is the estimate that this comes from."""

    mean: GoodputEstimate
    depths: Depths
    rate: float


class FreeDraftPlan(NamedTuple):
    """Offers that are sent: how many tokens of which sequence's (by index), and what to expect."""

    taken: dict[int, int]
    rate: float


class NgramArbiter:
    """Decides in which sequences a free draft takes the place of another draft, or of none."""

    def __init__(self, options: DepthOptions, target: TargetCost) -> None:
        self.options = options
        self.target = target
        self.known: dict[str, FreeDraftAcceptance] = {}

    def acceptance_of(self, source: str) -> FreeDraftAcceptance:
        """What is known of a drafter; of a new one, nothing."""
        if source not in self.known:
            self.known[source] = FreeDraftAcceptance(self.options.longest_free)
        return self.known[source]

    def over(
        self,
        requests: Sequence[DraftRequest],
        limits: list[DraftLimit],
        base: Baseline,
        last_rows: int,
    ) -> list[DraftLimit]:
        """`limits`, with a free draft's instead where that promises more. `last_rows` rows were in
        the last decode."""
        gains = [self._gains(room) for room in requests]
        if not any(gains) or self._is_hopeless(gains, base):
            return limits
        sending = self._best(gains, base, last_rows)
        if sending.rate <= HYSTERESIS * base.rate:
            return limits
        limits = list(limits)
        for i, n in sending.taken.items():
            free_draft = requests[i].free_draft
            assert free_draft
            limits[i] = DraftLimit(n, (), FREE_DRAFT, free_draft.source)
        return limits

    def _gains(self, room: DraftRequest) -> list[float]:
        """Expected tokens of a draft of 1, 2, ... tokens of the free_draft."""
        if room.free_draft is None:
            return []
        most = min(room.n_max, self.options.longest_free)
        rates = self.acceptance_of(room.free_draft.source).acceptance(
            room.seq, room.free_draft.confidence[:most]
        )
        floor = self.options.draft_p_min
        n = next((k for k, rate in enumerate(rates) if rate < floor), len(rates))
        if n < self.options.draft_min:
            return []
        return list(accumulate(accumulate(rates[:n], mul)))

    def _is_hopeless(self, gains: Sequence[Sequence[float]], base: Baseline) -> bool:
        """Whether not even all free drafts at the least that any decode may take would pay: most of
        the time, and soon told."""
        n_seqs = len(gains)
        tokens = n_seqs + sum([gain[-1] for gain in gains if gain])
        tokens += sum([sum(g[:n]) for g, n in zip(base.mean.gain, base.depths, strict=True)])
        most = self._most(n_seqs)
        least_s = min(self.target.low(most + 1)[n_seqs + 1 : most + 1])
        return tokens <= HYSTERESIS * base.rate * least_s

    def _most(self, n_seqs: int) -> int:
        """Rows that a decode may have: twice as many as were seen, as far as there is room."""
        most = max(2 * max(self.target.cells), n_seqs + max(self.options.draft_min, 1))
        return min(most, self.options.most_rows or most)

    def _best(
        self, gains: Sequence[Sequence[float]], base: Baseline, last_rows: int
    ) -> FreeDraftPlan:
        """One sequence after the other, each as far as it helps all."""
        n_seqs = len(gains)
        depths, n_sent, best = list(base.depths), 0, FreeDraftPlan({}, base.rate)
        others = [
            sum(gain[:n]) for gain, n in zip(base.mean.gain, base.depths, strict=True)
        ]  # expected from drafts that are not free drafts
        least = max(self.options.draft_min, 1)
        base_rows = n_seqs + sum(base.depths)
        most = self._most(n_seqs)
        sent = 0.0
        for i, gain in enumerate(gains):
            without = sum(others) - others[i]
            left = [*depths[:i], 0, *depths[i + 1 :]]
            rows = n_seqs + sum(left) + n_sent
            drafting = base.mean.drafting(left)
            n_best = 0
            for n in range(least, min(len(gain), most - rows) + 1):
                seconds = self._seconds(rows + n) + drafting
                seconds += self._turning(rows + n, last_rows, base_rows)
                rate = (n_seqs + without + sent + gain[n - 1]) / seconds
                if rate > best.rate:
                    n_best, best = n, FreeDraftPlan({**best.taken, i: n}, rate)
            if n_best:
                depths, others[i] = left, 0.0
                n_sent, sent = n_sent + n_best, sent + gain[n_best - 1]
        return best

    def _seconds(self, rows: int) -> float:
        """Of a target decode. Times that are hardly known are taken as low as they may well be:
        each use of one teaches more."""
        cell = self.target.cells.get(rows)
        if cell is None or cell.n < _YOUNG:
            return self.target.low(rows + 1)[rows]
        return self.target.mean(rows + 1)[rows]

    def _turning(self, rows: int, last_rows: int, base_rows: int) -> float:
        """Seconds for a decode of another shape than the last one. The way back to what is done
        without free drafts is paid for on the way there."""
        if rows == last_rows:
            return 0.0
        return self.target.rebuild * (2 if last_rows == base_rows else 1)
