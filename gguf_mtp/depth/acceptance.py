"""How likely the target accepts the token at each position of a draft, given the ones before it.

Estimated per sequence, because code, prose and quotations differ, over a prior that all sequences
feed and that persists over requests. It knows nothing of cost. A long average is precise and a
short one is quick: the long one is used until the two disagree, and then begun anew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_GUESS = 0.7  # acceptance at the first position before anything was judged
_GUESS_WEIGHT = 2.0  # in judged tokens
_FALL = 0.95  # the guess for a position, over its predecessor's estimate
SHARED_MEMORY = 512.0  # judged tokens that the prior remembers
_PRIOR_WEIGHT = 6.0  # of the prior in a sequence's estimate, in judged tokens
_LONG, _SHORT, _LAST = 128.0, 8.0, 3.0  # memories of a sequence, in judged tokens
_DISAGREE = 2.5  # standard deviations between them that mean the text has changed
_OPTIMISM = 1.5  # standard deviations
_AGING = 48.0  # rounds without a judgement in which evidence loses half its weight
_UNSURE = 100.0  # rounds after which an optimist believes that anything may be true again
_HOPE = 0.97  # what the optimist then believes


class Rates:
    """Decayed counts by position: `hits[j]` of `seen[j]` judged tokens were accepted."""

    __slots__ = ("hits", "memory", "seen")

    def __init__(self, n_max: int, memory: float) -> None:
        self.hits = [0.0] * n_max
        self.seen = [0.0] * n_max
        self.memory = memory

    def add(self, j: int, accepted: float) -> None:
        if self.seen[j] >= self.memory:
            keep = 1 - 1 / self.memory
            self.hits[j] *= keep
            self.seen[j] *= keep
        self.hits[j] += accepted
        self.seen[j] += 1.0

    def restore(self, hits: list[float], seen: list[float]) -> None:
        """Take over counts of another run, whose positions may be more or fewer."""
        for j in range(min(len(self.seen), len(seen))):
            keep = min(1.0, 0.5 * self.memory / max(seen[j], 1e-9))
            self.hits[j], self.seen[j] = keep * hits[j], keep * seen[j]

    def fade(self, keep: float) -> None:
        """Multiply the weight of all evidence by `keep`."""
        for j in range(len(self.seen)):
            self.hits[j] *= keep
            self.seen[j] *= keep


class _Sequence:
    __slots__ = ("at", "last", "long", "short")

    def __init__(self, n_max: int, now: int) -> None:
        self.long = Rates(n_max, _LONG)
        self.short = Rates(n_max, _SHORT)
        self.last = Rates(n_max, _LAST)
        self.at = now


class Acceptance:
    """Acceptance by position, of each sequence and shared. Time counts in `tick`s (rounds)."""

    def __init__(self, n_max: int, shared: Rates | None = None) -> None:
        self.shared = shared or Rates(n_max, SHARED_MEMORY)
        self._n_max = n_max
        self._sequences: dict[int, _Sequence] = {}
        self._now = 0
        self._prior: list[float] = []

    def tick(self, n_rounds: int = 1) -> None:
        """So many rounds have passed."""
        self._now += n_rounds

    def forget(self, seq: int) -> None:
        self._sequences.pop(seq, None)

    def knows(self, seq: int) -> bool:
        return seq in self._sequences

    def judge(self, seq: int, verdicts: Sequence[float]) -> None:
        """The target judged positions 0.. of a draft: 1 accepted, 0 rejected, or a probability
        where the token was not drafted and its acceptance is inferred."""
        track = self._sequences.get(seq)
        if track is None:
            track = self._sequences[seq] = _Sequence(self._n_max, self._now)
        if not verdicts:
            return
        if self._now - track.at > 1:
            keep = 0.5 ** ((self._now - track.at) / _AGING)
            track.long.fade(keep)
            track.short.fade(keep)
            track.last.fade(keep)
        track.at = self._now
        for j, accepted in enumerate(verdicts):
            self.shared.add(j, accepted)
            track.long.add(j, accepted)
            track.short.add(j, accepted)
            track.last.add(j, accepted)
        self._prior = []
        self._notice_change(track, len(verdicts))

    def _notice_change(self, track: _Sequence, n_judged: int) -> None:
        """Where the short memory contradicts the long one, believe only the last few judgements:
        the short one too still holds some of what was."""
        long, short = track.long, track.short
        for j in range(n_judged):
            n_long, n_short = long.seen[j], short.seen[j]
            if n_long < 2 * _SHORT:
                continue
            rate = long.hits[j] / n_long
            variance = (rate * (1 - rate) + 0.01) * (1 / n_short - 1 / n_long)
            if abs(short.hits[j] / n_short - rate) > _DISAGREE * math.sqrt(variance):
                long.hits[:], long.seen[:] = track.last.hits, track.last.seen
                return

    def prior(self) -> list[float]:
        """The shared estimate of each position, unseen ones guessed from their predecessors."""
        if not self._prior:
            guess = _GUESS
            for hits, seen in zip(self.shared.hits, self.shared.seen, strict=True):
                rate = (hits + _GUESS_WEIGHT * guess) / (seen + _GUESS_WEIGHT)
                self._prior.append(rate)
                guess = _FALL * rate
        return self._prior

    def mean(self, seq: int) -> list[float]:
        """Expected acceptance of each position of `seq`'s next draft.

        The prior of a position moves with what the sequence shows at the positions before it.
        """
        prior = self.prior()
        track = self._sequences.get(seq)
        if track is None:
            return prior
        rates, ratio = [], 1.0
        for hits, seen, guess in zip(track.long.hits, track.long.seen, prior, strict=True):
            expected = min(guess * ratio, 0.99)
            rate = (hits + _PRIOR_WEIGHT * expected) / (seen + _PRIOR_WEIGHT)
            rates.append(rate)
            ratio = rate / guess
        return rates

    def high(self, seq: int, mean: Sequence[float]) -> list[float]:
        """The same, as high as it may well be by now: old evidence counts less and less."""
        track = self._sequences.get(seq)
        if track is None:
            return [rate + 0.5 * (_HOPE - rate) if rate < _HOPE else rate for rate in mean]
        age = self._now - track.at
        hope = 1 - 0.5 ** (age / _UNSURE)
        keep = 0.5 ** (age / _AGING)
        rates = []
        for rate, seen in zip(mean, track.long.seen, strict=True):
            doubt = _OPTIMISM * math.sqrt((rate * (1 - rate) + 0.02) / (seen * keep + 3.0))
            rates.append(min(max(rate + doubt, rate + (_HOPE - rate) * hope), max(_HOPE, rate)))
        return rates
