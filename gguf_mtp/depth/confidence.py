"""Where to end a draft early: calibrated acceptance by the drafter's own confidence.

The confidence of a draft token (the largest probability of the drafter's distribution) tells easy
tokens from hard ones, but not how much it can be trusted: that is counted here, by position and
bin, and forced to rise with the confidence. A threshold per position then ends a draft where the
next token would not pay for its row and for the steps after it. SpecDec++ (arXiv 2405.19715) trains
a predictor and thresholds the chance of any rejection; thresholds here follow from measured prices.
A threshold sees the distribution's maximum, never the token drawn, so the output law stays.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from gguf_mtp.depth.goodput import StepCosts

EDGES = (0.4, 0.6, 0.8, 0.9, 0.97)
N_BINS = _N_BINS = len(EDGES) + 1
_MEMORY = 512.0  # judged tokens that a bin's acceptance remembers
_RECENT = 96.0  # draft tokens that the mix of bins at a position remembers
_POOL_WEIGHT = 8.0  # of a bin's acceptance over all positions, in judged tokens
_OTHERS = 10.0  # of all sequences' mix in that of one, in draft tokens
_LEAST_SEEN = 16.0  # draft tokens at the first position before a threshold is tried


class Table(NamedTuple):
    """By position and first bin kept (0 .. all of them .. none): `kept` share of drafts that go on,
    and `accepted` share that goes on and is then accepted."""

    kept: list[list[float]]
    accepted: list[list[float]]


class Calibration:
    """Counts of draft tokens by position and bin of confidence.

    `hits` of `seen` judged tokens were accepted; `mix` are recent draft tokens, judged or not.
    """

    def __init__(self, n_max: int) -> None:
        self.hits = [[0.0] * _N_BINS for _ in range(n_max)]
        self.seen = [[0.0] * _N_BINS for _ in range(n_max)]
        self.mix = [[0.0] * _N_BINS for _ in range(n_max)]
        self._mixed = [0.0] * n_max  # sums of `mix`
        self._rates: list[list[float]] = []

    def observe(self, confidence: Sequence[float], n_accepted: int, n_judged: int) -> None:
        """A draft with these confidences; the first `n_judged` tokens were judged."""
        for j, value in enumerate(confidence):
            b = bisect_right(EDGES, value)
            self._fade(j)
            self.mix[j][b] += 1.0
            if j < n_judged:
                seen, hits = self.seen[j], self.hits[j]
                if seen[b] >= _MEMORY:
                    seen[b] *= 1 - 1 / _MEMORY
                    hits[b] *= 1 - 1 / _MEMORY
                seen[b] += 1.0
                hits[b] += j < n_accepted

    def restore(self, hits: list[list[float]], seen: list[list[float]]) -> None:
        """Take over counts of another run; what was judged stands in for the recent mix."""
        for j in range(min(len(self.seen), len(seen))):
            total = sum(seen[j])
            if total > 0:
                self.hits[j], self.seen[j] = list(hits[j]), list(seen[j])
                keep = min(1.0, 0.25 * _RECENT / total)
                self.mix[j] = [keep * one for one in seen[j]]
                self._mixed[j] = sum(self.mix[j])

    def _fade(self, j: int) -> None:
        """Make room in the mix for one more draft token."""
        if self._mixed[j] >= _RECENT:
            keep = 1 - 1 / _RECENT
            self.mix[j] = [share * keep for share in self.mix[j]]
            self._mixed[j] *= keep
        self._mixed[j] += 1.0

    def shares_below(self, j: int, bound: float) -> list[float]:
        """How likely a confidence below `bound` at position `j` lies in each bin; sums to 1."""
        n_below = bisect_right(EDGES, bound * (1 - 1e-9)) + 1
        mix = [one + 1e-3 for one in self.mix[j][:n_below]]
        total = sum(mix)
        return [one / total for one in mix] + [0.0] * (_N_BINS - n_below)

    def observe_cut(self, j: int, shares: Sequence[float]) -> float:
        """A draft ended at position `j`, its confidence in one of the bins with these `shares`: the
        expected acceptance of the token that was not drafted."""
        self._fade(j)
        rates = self._rates[j] if j < len(self._rates) else self.rates()[j]
        self.mix[j] = [one + share for one, share in zip(self.mix[j], shares, strict=True)]
        return sum(share * rate for share, rate in zip(shares, rates, strict=True))

    def rates(self) -> list[list[float]]:
        """Acceptance by position and bin: pooled over positions where little was seen, rising."""
        all_seen = [sum(column) for column in zip(*self.seen, strict=True)]
        all_hits = [sum(column) for column in zip(*self.hits, strict=True)]
        mean = (sum(all_hits) + 1.0) / (sum(all_seen) + 2.0)
        pooled = [
            (hits + _POOL_WEIGHT * mean) / (seen + _POOL_WEIGHT)
            for hits, seen in zip(all_hits, all_seen, strict=True)
        ]
        self._rates = []
        for hits, seen in zip(self.hits, self.seen, strict=True):
            weights = [one + _POOL_WEIGHT for one in seen]
            rates = [(hits[b] + _POOL_WEIGHT * pooled[b]) / weights[b] for b in range(_N_BINS)]
            self._rates.append(rising(rates, weights))
        return self._rates

    def table(self, n: int, first: float, own: Sequence[Sequence[float]] = ()) -> Table:
        """For positions 0..n-1; a position without draft tokens borrows its predecessor's mix.
        `own[j]` is the mix of the sequence at hand, which counts for more than the others'.

        Where the sequence at hand is accepted less at position 0 (`first`) than its confidences
        promise, all its promises are lowered in proportion.
        """
        kept, accepted = [], []
        mix, trust = [1.0] * _N_BINS, 1.0
        for j, rates in enumerate(self.rates()[:n]):
            if self._mixed[j] >= 1.0:
                mix = self.mix[j]
            if j < len(own):
                share = _OTHERS / max(sum(mix), 1e-9)
                mix = [share * one + mine for one, mine in zip(mix, own[j], strict=True)]
            total = sum(mix)
            if j == 0:
                promised = sum(share * rate for share, rate in zip(mix, rates, strict=True)) / total
                trust = min(first / promised, 1.0)
            keep, accept = [0.0], [0.0]
            for b in range(_N_BINS - 1, -1, -1):
                keep.append(keep[-1] + mix[b] / total)
                accept.append(accept[-1] + mix[b] / total * rates[b] * trust)
            kept.append(keep[::-1])
            accepted.append(accept[::-1])
        return Table(kept, accepted)

    @property
    def is_ready(self) -> bool:
        return bool(self.mix) and self._mixed[0] >= _LEAST_SEEN


def rising(rates: list[float], weights: list[float]) -> list[float]:
    """The closest non-decreasing sequence (pool adjacent violators)."""
    blocks: list[tuple[float, float, int]] = []
    for rate, weight in zip(rates, weights, strict=True):
        blocks.append((rate, weight, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (r2, w2, n2), (r1, w1, n1) = blocks.pop(), blocks.pop()
            blocks.append(((r1 * w1 + r2 * w2) / (w1 + w2), w1 + w2, n1 + n2))
    return [rate for rate, _, n in blocks for _ in range(n)]


def rate_under(table: Table, cut: Sequence[int], prices: StepCosts, rebuild: float) -> float:
    """Expected tokens per second of one sequence that drafts up to `len(cut)` tokens and stops
    before position j when the confidence there lies in a bin below `cut[j]`.

    Positions count as independent given the bins. The row count varies from round to round, so
    llama.cpp rebuilds its graph whenever two rounds in a row differ: `rebuild` seconds each.
    """
    target = prices.target
    going, accepted, tokens, seconds, same = 1.0, 1.0, 1.0, 0.0, 0.0
    step = prices.first
    for j, i in enumerate(cut):
        seconds += going * step
        step = prices.further
        stopped = going * (1 - table.kept[j][i])
        seconds += stopped * target[1 + j]
        same += stopped * stopped
        going *= table.kept[j][i]
        accepted *= table.accepted[j][i]
        tokens += accepted
    seconds += going * target[1 + len(cut)]
    same += going * going
    return tokens / (seconds + rebuild * (1 - same))


def best_cut(
    table: Table, prices: StepCosts, rebuild: float, least: int
) -> tuple[list[int], float]:
    """First bins kept at each position, and the rate under them; the first `least` positions but
    one stay open, so that a draft has `least` tokens or none.

    Coordinate ascent from an open draft of full length: thresholds first, then the length too.
    """
    cut = [0] * len(table.kept)
    best = rate_under(table, cut, prices, rebuild)
    for may_shorten in (False, True):
        for j in range(len(cut) - 1, -1, -1):
            trials = [] if 0 < j < least else [[*cut[:j], i, *cut[j + 1 :]] for i in range(_N_BINS)]
            if may_shorten and j >= least:
                trials.append(cut[:j])
            for trial in trials:
                rate = rate_under(table, trial, prices, rebuild)
                if rate > best:
                    best, cut = rate, trial
    return cut, best
