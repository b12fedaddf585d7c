"""When to try depths that are not known to be the best, and what trying may cost.

A probe runs for two rounds or more, because the first round after a change of shape is not recorded
(llama.cpp rebuilds its graph then). What it costs over doing the best known thing is bounded by a
share of all decode time; a direction that does not pay is tried half as often each time. Cascade
(arXiv 2506.20675) bounds its trials likewise, with fixed lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gguf_mtp.depth.cost_model import TargetCost
from gguf_mtp.depth.goodput import DepthChoice, Depths, GoodputEstimate

HYSTERESIS = 1.02  # another choice must promise this much more

_SHARE = 0.007  # of all decode time is put aside for probes
_BUDGET = 3.2  # plain rounds put aside at first and at most: 1.5 % of 400 rounds altogether
_FIRST_WAIT, _LAST_WAIT = 8, 512  # rounds between probes in a direction that does not pay
_CALM = 0.004  # waits do not grow once probes cost less than this share of the time
_LEAST_ROUNDS, _MOST_ROUNDS = 2, 32
_LOOK_EVERY = 4  # rounds between looks for something worth probing
_REBUILD = 0.5  # the most that rebuilding a graph adds, in plain rounds (0.39 was measured)


@dataclass(slots=True)
class Probe:
    """A trial in progress: who drafts how far, what would be done `instead`, and its cost."""

    seqs: tuple[int, ...]
    depths: Depths
    instead: DepthChoice
    n_rounds: int = 0
    n_recorded: int = 0
    seconds: float = 0.0
    target_s: float = 0.0  # of the last round

    @property
    def is_up(self) -> bool:
        return sum(self.depths) > sum(self.instead.depths)

    @property
    def may_end(self) -> bool:
        enough = self.n_recorded > 0 or self.n_rounds >= 2 * _LEAST_ROUNDS
        return self.n_rounds >= _LEAST_ROUNDS and enough

    def cost(self, tokens: float) -> float:
        """Seconds lost against the best known rate, when a round is expected to commit `tokens`.
        What it did commit would add luck to the account."""
        return max(self.seconds - self.n_rounds * tokens / self.instead.rate, 0.0)


class Prober:
    """Starts, prolongs and ends probes, and keeps their account: `spent` of `elapsed` seconds."""

    def __init__(self, target: TargetCost) -> None:
        self.probe: Probe | None = None
        self.spent = 0.0
        self.elapsed = 0.0
        self._budget: float | None = None  # seconds; unknown before a plain round was measured
        self._target = target
        self._now = 0
        self._wait = {True: _FIRST_WAIT, False: _FIRST_WAIT}
        self._next = {True: 0, False: 0}
        self._next_look = 0

    def waits(self) -> dict[str, list[int]]:
        """Rounds to wait before a probe down and up, and the length of those waits: for a state."""
        left = [max(self._next[up] - self._now, 0) for up in (False, True)]
        return {"left": left, "length": [self._wait[False], self._wait[True]]}

    def purse(self, plain: float) -> float:
        """What may be lost to probes now, in plain rounds of `plain` seconds."""
        return _BUDGET if self._budget is None else min(self._budget / plain, _BUDGET)

    def restore(self, left: list[int], length: list[int], purse_s: float) -> None:
        """Go on where another run stopped: a process started anew has no new allowance."""
        for up in (False, True):
            self._next[up] = min(left[up], _LAST_WAIT)
            self._wait[up] = min(max(length[up], _FIRST_WAIT), _LAST_WAIT)
        self._budget = purse_s

    def record(self, seconds: float, target_s: float, recorded: bool) -> None:
        """A round took `seconds`; `recorded`: its target time counted."""
        self._now += 1
        self.elapsed += seconds
        if self._budget is not None:
            self._budget += _SHARE * seconds
        if self.probe is not None:
            self.probe.n_rounds += 1
            self.probe.n_recorded += recorded
            self.probe.seconds += seconds
            self.probe.target_s = target_s

    def skip(self, n_rounds: int, seconds: float) -> None:
        """So many rounds without a probe passed; they took `seconds` in all."""
        self._now += n_rounds
        self.elapsed += seconds
        if self._budget is not None:
            self._budget += _SHARE * seconds

    def next(
        self,
        seqs: tuple[int, ...],
        view: GoodputEstimate,
        best: DepthChoice,
        optimist: Callable[[], GoodputEstimate],
    ) -> Depths | None:
        """Depths to try in this round, or None to do the best known thing."""
        if self.probe is not None and self._goes_on(self.probe, seqs, view, best, optimist):
            return self.probe.depths
        if self._now < self._next_look:
            return None
        self._next_look = self._now + _LOOK_EVERY
        self.probe = self._find(seqs, view, best, optimist())
        return self.probe.depths if self.probe else None

    # -- ending ----------------------------------------------------------------------------------

    def _goes_on(
        self,
        probe: Probe,
        seqs: tuple[int, ...],
        view: GoodputEstimate,
        best: DepthChoice,
        optimist: Callable[[], GoodputEstimate],
    ) -> bool:
        if probe.seqs != seqs or not view.fits(probe.depths):
            self._end(probe, probe.cost(len(probe.depths)), view, paid=True)
            return False
        tokens = view.tokens(probe.depths)
        paid = False
        if probe.may_end:
            moved = sum(best.depths) - sum(probe.instead.depths)
            paid = moved != 0 and (moved > 0) == probe.is_up
            if not paid and probe.n_rounds < _MOST_ROUNDS:
                lost = max(view.seconds(probe.depths) - tokens / best.rate, 0.0)
                if self._affords(probe.cost(tokens) + lost, view):
                    return optimist().rate_of(probe.depths) > HYSTERESIS * best.rate or self._end(
                        probe, probe.cost(tokens), view, paid=False
                    )
        elif probe.n_rounds != 1 or not self._is_hopeless(probe, view, optimist):
            return True
        return self._end(probe, probe.cost(tokens), view, paid)

    def _end(self, probe: Probe, cost: float, view: GoodputEstimate, paid: bool) -> bool:
        """Book a probe; False, as it does not go on."""
        cost += self._target.rebuild  # on the way back
        self.spent += cost
        if self._budget is not None:
            self._budget -= cost
        self.probe = None
        self._next_look = self._now
        up = probe.is_up
        if paid:
            self._wait[up] = _FIRST_WAIT
        else:
            self._next[up] = self._now + self._wait[up]
            longest = min(max(cost / (_CALM * view.plain), 4.0 * _FIRST_WAIT), _LAST_WAIT)
            self._wait[up] = min(2 * self._wait[up], int(longest))
        return False

    def _is_hopeless(
        self, probe: Probe, view: GoodputEstimate, optimist: Callable[[], GoodputEstimate]
    ) -> bool:
        """Whether the first round, though its graph was rebuilt, took too long for any luck."""
        rows = len(view.room) + sum(probe.depths)
        if rows in self._target.cells:
            return False
        least = probe.seconds * self._target.least - _REBUILD * view.plain
        if optimist().tokens(probe.depths) > probe.instead.rate * least:
            return False
        self._target.guess(rows, probe.target_s)
        return True

    # -- starting --------------------------------------------------------------------------------

    def _affords(self, cost: float, view: GoodputEstimate) -> bool:
        """Whether `cost` seconds may be lost. A full purse allows any: then it runs into debt."""
        full = _BUDGET * view.plain
        if self._budget is None:
            self._budget = full
        self._budget = min(self._budget, full)
        return self._budget >= min(cost, full)

    def _find(
        self, seqs: tuple[int, ...], view: GoodputEstimate, best: DepthChoice, high: GoodputEstimate
    ) -> Probe | None:
        """The change that promises most and is affordable. Even the plain estimate may promise more
        at a cost extrapolated from others: then that comes first."""
        n_seqs, top = len(view.room), max(self._target.cells)
        reach = max(2 * top - n_seqs, view.items[0].rows if view.items else 0)
        hopes = self._hopes(high, best, reach)
        leap = view.best(reach)
        if view.rates[leap] > HYSTERESIS * best.rate and n_seqs + sum(view.depths(leap)) > top:
            hopes.insert(0, view.depths(leap))
        for depths in hopes:
            is_new = n_seqs + sum(depths) not in self._target.cells
            if not is_new and self._now < self._next[sum(depths) > sum(best.depths)]:
                continue
            lost = max(view.seconds(depths) - view.tokens(depths) / best.rate, 0.0)
            n_rounds = 1 if is_new else 2  # a new one that is hopeless ends after one
            if self._affords(n_rounds * lost + 2 * self._target.rebuild, view):
                return Probe(seqs, depths, best)
        return None

    @staticmethod
    def _hopes(high: GoodputEstimate, best: DepthChoice, reach: int) -> list[Depths]:
        """Depths of at most `reach` draft rows that an optimist prefers to `best`, best first."""
        hopes = [
            (rate, high.depths(k))
            for k, rate in enumerate(high.rates)
            if rate > HYSTERESIS * best.rate
        ]
        hopes.sort(key=lambda hope: -hope[0])
        return [d for _, d in hopes if d != best.depths and sum(d) <= reach]
