"""Automatic depth: draft as far as it pays on the text at hand, and not at all where it does not.

Every round: learn what the last one cost and what was accepted, then take the depths with the most
expected tokens per second among those whose cost is known, or for a few rounds try others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gguf_mtp.depth.acceptance import Acceptance
from gguf_mtp.depth.costs import DraftCost, TargetCost
from gguf_mtp.depth.plan import Item, Prices, depths_of, gains, growth, rate_of, rates
from gguf_mtp.depth.probe import Probe, ProbeBudget, may_end, must_end
from gguf_mtp.depth.stopping import Outlook, Stopping
from gguf_mtp.depth.watchdog import Watchdog
from gguf_mtp.errors import RequestError
from gguf_mtp.types import Limit, Room, Round

_REBUILD = 0.5  # the most that rebuilding a graph adds, in plain rounds (0.39 was measured)
_HYSTERESIS = 1.02  # another choice must be this much better
_SURE = 0.04  # relative error of the plain time at which trying depths begins
_LOOK_EVERY = 4  # rounds between looks for something worth probing
_PLAIN_ROUNDS = 8  # measured before that at most


@dataclass(frozen=True, slots=True)
class DepthOptions:
    """Bounds of a draft: 0 or `draft_min` to `draft_max` tokens, each with a confidence of at least
    `draft_p_min`. Raises `RequestError` when they make no sense."""

    draft_min: int = 1
    draft_max: int = 8
    draft_p_min: float = 0.0

    def __post_init__(self) -> None:
        if self.draft_max < 0:
            raise RequestError(f"draft_max is {self.draft_max}, but must be 0 (off) or more")
        if not 0 <= self.draft_min <= max(self.draft_max, 1):
            raise RequestError(
                f"draft_min is {self.draft_min}, but must be from 0 to draft_max ({self.draft_max})"
            )
        if not 0 <= self.draft_p_min <= 1:
            raise RequestError(f"draft_p_min is {self.draft_p_min}, but must be from 0 (off) to 1")


class Choice(NamedTuple):
    """Depths by sequence, and their expected tokens per second."""

    depths: tuple[int, ...]
    rate: float


class View(NamedTuple):
    """One estimate of everything: `rates[k]` follows from the first k of `items`."""

    room: list[int]
    acceptance: Sequence[Sequence[float]]
    gain: Sequence[Sequence[float]]
    prices: Prices
    items: Sequence[Item]
    rates: Sequence[float]

    @property
    def plain(self) -> float:
        """Seconds of a round without drafts."""
        return self.prices.target[len(self.room)]

    def depths(self, k: int) -> tuple[int, ...]:
        return depths_of(self.items[:k], len(self.room))

    def rate_of(self, depths: Sequence[int]) -> float:
        return rate_of(depths, self.gain, self.prices)

    def tokens(self, depths: Sequence[int]) -> float:
        return len(depths) + sum(sum(g[:n]) for g, n in zip(self.gain, depths, strict=True))


class AutoDepth:
    """The depth decision of one engine; its state lives as long as the engine."""

    def __init__(self, options: DepthOptions | None = None) -> None:
        self.options = options or DepthOptions()
        self.target = TargetCost()
        self.draft = DraftCost()
        self.acceptance = Acceptance(self.options.draft_max)
        self.budget = ProbeBudget()
        self.stopping = Stopping(
            self.options.draft_max, self.options.draft_p_min, self.options.draft_min
        )
        self.watchdog = Watchdog()
        self.probe: Probe | None = None
        self._seqs: tuple[int, ...] = ()
        self._depths: tuple[int, ...] = ()
        self._given: list[Limit] = []
        self._last_rows = 0
        self._last_drafted = False
        self._until_look = 0

    @property
    def n_max(self) -> int:
        return self.options.draft_max

    @property
    def off_reason(self) -> str | None:
        return self.watchdog.reason

    def forget(self, seq: int) -> None:
        self.acceptance.forget(seq)
        self._last_rows = 0

    # -- choosing --------------------------------------------------------------------------------

    def choose(self, rooms: Sequence[Room]) -> list[Limit]:
        self._seqs = tuple(room.seq for room in rooms)
        room = [min(one.n_max, self.options.draft_max) for one in rooms]
        if self.watchdog.reason or not any(room) or self._is_starting(len(rooms)):
            self._given = [Limit(0)] * len(rooms)
        else:
            self._given = self._decide(room)
        return self._given

    def _decide(self, room: list[int]) -> list[Limit]:
        n_seqs = len(room)
        mean = [self.acceptance.mean(seq) for seq in self._seqs]
        view = self._view(mean, room, self.target.mean(n_seqs + sum(room) + 1))
        best = self._best(view)
        if self.probe is not None and self._goes_on(self.probe, view, best):
            return self._fixed(self.probe.depths)
        self._until_look -= 1
        if self._until_look <= 0:
            self.probe = self._find_probe(view, best)
            if self.probe is not None:
                return self._fixed(self.probe.depths)
            self._until_look = _LOOK_EVERY
        self._depths = best.depths
        return self._stopped(view, best) or self._fixed(best.depths)

    def _fixed(self, depths: Sequence[int]) -> list[Limit]:
        return [self.stopping.limit(n) for n in depths]

    def _stopped(self, view: View, best: Choice) -> list[Limit] | None:
        """Limits with thresholds on confidence, where those pay more than fixed depths."""
        if len(view.room) > 1:
            return None
        self.stopping.look(
            Outlook(
                first=view.acceptance[0][0],
                fixed=best.depths[0],
                deepest=min(max(self.target.cells) - 1, view.room[0]),
                prices=view.prices,
                rebuild=self.target.rebuild,
            )
        )
        limit = self.stopping.stopped(view.room[0])
        return [limit] if limit else None

    def _is_starting(self, n_seqs: int) -> bool:
        """Whether plain rounds must be measured first: as many as their scatter asks for."""
        cells = self.target.cells
        if not cells or n_seqs > max(cells):
            return True
        if len(cells) > 1 or n_seqs not in cells:
            return False
        return cells[n_seqs].n < _PLAIN_ROUNDS and self.target.spread(n_seqs) > _SURE

    def _view(self, acceptance: Sequence[Sequence[float]], room: list[int], target: list[float]) -> View:
        gain = [gains(one, n) for one, n in zip(acceptance, room, strict=True)]
        n_seqs = len(room)
        first, further, row = self.draft.parts(target[1])
        prices = Prices(target, first, further, row, self.draft.idle)
        items = growth(gain, self.options.draft_min)
        return View(room, acceptance, gain, prices, items, rates(items, n_seqs, prices))

    def _best(self, view: View) -> Choice:
        """The best depths among row counts up to the largest measured, the last ones preferred."""
        top = max(self.target.cells)
        rows, k = len(view.room), 0
        for i, item in enumerate(view.items, 1):
            rows += item.rows
            if rows > top:
                break
            if view.rates[i] > view.rates[k]:
                k = i
        if len(self._depths) == len(view.room) and self._fits(self._depths, view.room):
            rate = view.rate_of(self._depths)
            if view.rates[k] <= _HYSTERESIS * rate:
                return Choice(self._depths, rate)
        return Choice(view.depths(k), view.rates[k])

    @staticmethod
    def _fits(depths: tuple[int, ...], room: list[int]) -> bool:
        return all(n <= most for n, most in zip(depths, room, strict=True))

    # -- probing ---------------------------------------------------------------------------------

    def _optimist(self, view: View) -> View:
        high = [
            self.acceptance.high(seq, mean)
            for seq, mean in zip(self._seqs, view.acceptance, strict=True)
        ]
        return self._view(high, view.room, self.target.low(len(view.prices.target)))

    def _goes_on(self, probe: Probe, view: View, best: Choice) -> bool:
        """Whether the probe takes another round; if not, it is booked."""
        if probe.seqs != self._seqs or not self._fits(probe.depths, view.room):
            return self._close(probe, view, True)
        if probe.n_rounds == 1 and self._is_hopeless(probe, view):
            return self._close(probe, view, False)
        if not may_end(probe):
            return True
        moved = sum(best.depths) - sum(probe.best)
        if moved != 0 and (moved > 0) == probe.is_up:
            return self._close(probe, view, True)
        if not must_end(probe) and self._is_promising(probe, view, best):
            return True
        return self._close(probe, view, False)

    def _is_promising(self, probe: Probe, view: View, best: Choice) -> bool:
        if self._optimist(view).rate_of(probe.depths) <= _HYSTERESIS * best.rate:
            return False
        tokens = view.tokens(probe.depths)
        lost = tokens * (1 / view.rate_of(probe.depths) - 1 / best.rate)
        return self.budget.affords(probe.cost(tokens) + max(lost, 0.0), view.plain)

    def _close(self, probe: Probe, view: View, paid: bool) -> bool:
        tokens = view.tokens(probe.depths) if len(probe.depths) == len(view.room) else len(probe.depths)
        self.budget.close(probe, probe.cost(tokens) + self.target.rebuild, paid, view.plain)
        self.probe = None
        self._until_look = 1
        return False

    def _is_hopeless(self, probe: Probe, view: View) -> bool:
        """Whether the first round, though its graph was rebuilt, took too long for any luck."""
        rows = len(view.room) + sum(probe.depths)
        if rows in self.target.cells:
            return False
        high = self._optimist(view)
        least = probe.seconds * self.target.least - _REBUILD * view.plain
        if high.tokens(probe.depths) > probe.rate * least:
            return False
        self.target.guess(rows, probe.target_s)
        return True

    def _find_probe(self, view: View, best: Choice) -> Probe | None:
        """The smallest change that may beat the best known choice; a leap where even the plain
        estimate, cost extrapolated, says that it does."""
        reach = 2 * max(self.target.cells) - len(view.room)
        high = self._optimist(view)
        leap = self._leap(view, best, reach)
        for depths in ([leap] if leap else []) + self._hopes(high, best, reach):
            is_new = sum(depths) + len(depths) not in self.target.cells
            if not is_new and self.budget.waits(sum(depths) > sum(best.depths)):
                continue
            tokens = view.tokens(depths)
            lost = tokens / view.rate_of(depths) - tokens / best.rate
            cost = (1 if is_new else 2) * max(lost, 0.0) + 2 * self.target.rebuild
            if self.budget.affords(cost, view.plain):
                return Probe(self._seqs, depths, best.depths, best.rate)
        return None

    def _leap(self, view: View, best: Choice, reach: int) -> tuple[int, ...] | None:
        rows, k = 0, 0
        for i, item in enumerate(view.items, 1):
            rows += item.rows
            if rows > reach:
                break
            if view.rates[i] > view.rates[k]:
                k = i
        depths = view.depths(k)
        is_beyond = sum(depths) + len(depths) > max(self.target.cells)
        return depths if is_beyond and view.rates[k] > _HYSTERESIS * best.rate else None

    @staticmethod
    def _hopes(high: View, best: Choice, reach: int) -> list[tuple[int, ...]]:
        """Depths that an optimist rates above the best known, best first."""
        hopes = []
        for k, rate in enumerate(high.rates):
            if rate > _HYSTERESIS * best.rate:
                depths = high.depths(k)
                if depths != best.depths and sum(depths) <= reach:
                    hopes.append((rate, depths))
        hopes.sort(key=lambda hope: -hope[0])
        return [depths for _, depths in hopes]

    # -- learning --------------------------------------------------------------------------------

    def record(self, round_: Round) -> None:
        self.acceptance.tick()
        self._record_target(round_)
        self._record_draft(round_, self._judge(round_))
        self.watchdog.see(round_.judged)
        seconds = round_.target_s + round_.draft_s + round_.other_s
        self.budget.tick(seconds)
        if self.probe is not None:
            self.probe.n_rounds += 1
            self.probe.seconds += seconds
            self.probe.target_s = round_.target_s + round_.other_s

    def _record_target(self, round_: Round) -> None:
        if round_.n_prefill or not round_.n_rows:
            self._last_rows = 0
            return
        same = round_.n_rows == self._last_rows
        self._last_rows = round_.n_rows
        self.target.observe(round_.n_rows, round_.target_s + round_.other_s, same)
        if same and self.probe is not None:
            self.probe.n_recorded += 1

    def _judge(self, round_: Round) -> list[int]:
        """Learn what was accepted; returns how many draft steps each sequence took."""
        limits = dict(zip(self._seqs, self._given, strict=True))
        steps = []
        for one in round_.judged:
            verdicts = [1.0] * one.n_accepted + [0.0] * (one.n_judged - one.n_accepted)
            steps.append(
                self.stopping.observe(limits.get(one.seq, Limit(0)), one.confidence, verdicts)
            )
            self.acceptance.judge(one.seq, verdicts)
        return steps

    def _record_draft(self, round_: Round, steps: list[int]) -> None:
        if any(steps):
            if self._last_drafted:
                self.draft.observe(max(steps), sum(steps), round_.draft_s)
            self._last_drafted = True
        else:
            self._last_drafted = False
            self.draft.observe_idle(round_.draft_s)
