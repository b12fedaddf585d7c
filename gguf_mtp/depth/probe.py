"""When to try a depth that is not known to be the best one, and what trying may cost.

A probe runs for two rounds or more, because the first round after a change of shape is not recorded
(llama.cpp rebuilds its graph then). What it costs over doing the best known thing is bounded by a
share of all decode time; a direction that does not pay is tried half as often each time. Cascade
(arXiv 2506.20675) bounds its trials likewise, with fixed lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

SHARE = 0.015  # of all decode time that probes may cost
_EARLY_SHARE = 0.005  # the same before the first 400 plain rounds, on top of the allowance
_ALLOWANCE = 4.0  # plain rounds that probes may cost at once
_FIRST_WAIT, _LAST_WAIT = 8, 512  # rounds between probes in a direction that does not pay
_CALM = 0.004  # waits do not grow once probes cost less than this share of the time
_LEAST_ROUNDS, _MOST_ROUNDS = 2, 32


@dataclass(slots=True)
class Probe:
    """A trial in progress: who drafts how far, and what it has cost and committed."""

    seqs: tuple[int, ...]
    depths: tuple[int, ...]
    best: tuple[int, ...]  # what would be done otherwise
    rate: float  # and its tokens per second
    n_rounds: int = 0
    n_recorded: int = 0
    seconds: float = 0.0
    target_s: float = 0.0  # of the last round

    @property
    def is_up(self) -> bool:
        return sum(self.depths) > sum(self.best)

    def cost(self, tokens: float) -> float:
        """Seconds lost so far against the best known rate, when a round is expected to commit
        `tokens`. What it did commit would add luck to the account."""
        return max(self.seconds - self.n_rounds * tokens / self.rate, 0.0)


class ProbeBudget:
    """Keeps the account of probes: seconds spent, and the wait in each direction."""

    def __init__(self) -> None:
        self.spent = 0.0
        self.elapsed = 0.0
        self._now = 0
        self._wait = {True: _FIRST_WAIT, False: _FIRST_WAIT}
        self._next = {True: 0, False: 0}

    def tick(self, seconds: float) -> None:
        self._now += 1
        self.elapsed += seconds

    def waits(self, up: bool) -> bool:
        """Whether it is too early to try a direction again that did not pay."""
        return self._now < self._next[up]

    def affords(self, cost: float, plain: float) -> bool:
        """Whether `cost` more seconds may be lost; `plain`: seconds of a plain round."""
        return self.spent + cost <= max(_ALLOWANCE * plain + _EARLY_SHARE * self.elapsed, SHARE * self.elapsed)

    def close(self, probe: Probe, cost: float, paid: bool, plain: float) -> None:
        """Book a finished probe that cost `cost` seconds."""
        self.spent += cost
        up = probe.is_up
        if paid:
            self._wait[up] = _FIRST_WAIT
            return
        self._next[up] = self._now + self._wait[up]
        longest = min(max(cost / (_CALM * plain), 4.0 * _FIRST_WAIT), _LAST_WAIT)
        self._wait[up] = min(2 * self._wait[up], int(longest))


def may_end(probe: Probe) -> bool:
    return probe.n_rounds >= _LEAST_ROUNDS and (
        probe.n_recorded > 0 or probe.n_rounds >= 2 * _LEAST_ROUNDS
    )


def must_end(probe: Probe) -> bool:
    return probe.n_rounds >= _MOST_ROUNDS
