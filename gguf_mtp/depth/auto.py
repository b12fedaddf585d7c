"""Automatic depth: draft as far as it pays on the text at hand, and not at all where it does not.

Every round: learn what the last one cost and what was accepted, then take the depths with the most
expected tokens per second among those whose cost is known, or for a few rounds try others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gguf_mtp.depth.acceptance import Acceptance, Rates
from gguf_mtp.depth.confidence import Calibration
from gguf_mtp.depth.costs import DraftCost, TargetCost
from gguf_mtp.depth.options import DepthOptions
from gguf_mtp.depth.plan import Choice, Depths, Prices, View, view
from gguf_mtp.depth.probe import HYSTERESIS, Prober
from gguf_mtp.depth.report import DepthReport, reason_off
from gguf_mtp.depth.stopping import Outlook, Stopping
from gguf_mtp.depth.watchdog import Watchdog
from gguf_mtp.types import Limit, Room, Round

_SURE = 0.04  # relative error of the plain time at which trying depths begins
_LONGEST_HOLD = 4
_PLAIN_ROUNDS = 8  # recorded before that at most


class Learned(NamedTuple):
    """What outlives an engine (`state.py` stores it): costs, shared acceptance, calibration."""

    target: TargetCost
    draft: DraftCost
    shared: Rates
    calibration: Calibration


class AutoDepth:
    """The depth decision of one engine; what it has learned lives as long as the engine."""

    def __init__(self, options: DepthOptions | None = None) -> None:
        self.options = options or DepthOptions()
        most = self.options.draft_max
        self.target = TargetCost()
        self.draft = DraftCost()
        self.acceptance = Acceptance(most)
        self.prober = Prober(self.target)
        self.stopping = Stopping(most, self.options.draft_p_min, self.options.draft_min)
        self._watchdog = Watchdog()
        self._seqs: tuple[int, ...] = ()
        self._given: list[Limit] = []
        self._room: list[int] = []
        self._hold = 1  # rounds that a choice stands beyond its own, so that their time counts
        self._held = 0  # of those still to come
        self._kept: tuple[tuple[int, ...], Depths] = ((), ())  # the last choice, and for whom
        self._last_rows = 0
        self._last_drafted = False

    def warm_start(self, learned: Learned) -> None:
        """Begin with what another run has learned instead of with plain rounds."""
        self.target, self.draft, shared, self.stopping.calibration = learned
        self.acceptance = Acceptance(self.options.draft_max, shared)
        self.prober = Prober(self.target)

    @property
    def n_max(self) -> int:
        return self.options.draft_max

    @property
    def off_reason(self) -> str | None:
        return self._watchdog.reason

    def forget(self, seq: int) -> None:
        self.acceptance.forget(seq)
        self._last_rows = 0  # the next decode follows a prompt

    # -- choosing --------------------------------------------------------------------------------

    def choose(self, rooms: Sequence[Room]) -> list[Limit]:
        seqs = tuple([one.seq for one in rooms])
        room = [min(one.n_max, self.options.draft_max) for one in rooms]
        if self._watchdog.reason or not any(room) or self._is_starting(len(rooms)):
            self._given, self._held = [Limit(0)] * len(rooms), 0
        elif self._held and seqs == self._seqs and room == self._room:
            self._given = self._limits(self._kept[1], room)
            self._held -= 1
        else:
            self._seqs, self._room = seqs, room
            self._given = self._decide(room)
        self._seqs = seqs
        return self._given

    def _is_starting(self, n_seqs: int) -> bool:
        """Whether plain rounds must be measured first: as many as their scatter asks for."""
        cells = self.target.cells
        if not cells or n_seqs > max(cells):
            return True
        if len(cells) > 1 or n_seqs not in cells:
            return False
        return cells[n_seqs].n < _PLAIN_ROUNDS and self.target.spread(n_seqs) > _SURE

    def _decide(self, room: list[int]) -> list[Limit]:
        acceptance = [self.acceptance.mean(seq) for seq in self._seqs]
        size = len(room) + sum(room) + 1
        mean = view(acceptance, room, self._prices(self.target.mean(size)), self.options.draft_min)
        best = self._best(mean)
        instead = Choice(best.depths, best.rate * self.stopping.gain)
        depths = self.prober.next(self._seqs, mean, instead, lambda: self._optimist(mean, size))
        if depths is not None:
            self._hold, self._held = 1, 0
            return [self.stopping.limit(n) for n in depths]
        # Without drafts nothing is learned that could change the choice soon.
        self._hold = 1 if any(best.depths) else min(2 * self._hold, _LONGEST_HOLD)
        self._held = self._hold
        self._kept = (self._seqs, best.depths)
        if len(room) == 1:
            self._look(mean, best)
        return self._limits(best.depths, room)

    def _limits(self, depths: Depths, room: list[int]) -> list[Limit]:
        """Thresholds on confidence where those pay, else these depths."""
        stopped = self.stopping.stopped(room[0]) if len(room) == 1 else None
        return [stopped] if stopped else [self.stopping.limit(n) for n in depths]

    def _prices(self, target: Sequence[float]) -> Prices:
        return Prices(target, *self.draft.parts(target[1]), self.draft.idle)

    def _optimist(self, mean: View, size: int) -> View:
        acceptance = [
            self.acceptance.high(seq, rates)
            for seq, rates in zip(self._seqs, mean.acceptance, strict=True)
        ]
        prices = self._prices(self.target.low(size))
        return view(acceptance, mean.room, prices, self.options.draft_min)

    def _best(self, mean: View) -> Choice:
        """The best depths among row counts up to the largest measured; the last ones stay unless
        others are clearly better."""
        k = mean.best(max(self.target.cells) - len(mean.room))
        seqs, depths = self._kept
        if seqs == self._seqs and mean.fits(depths):
            rate = mean.rate_of(depths)
            if mean.rates[k] <= HYSTERESIS * rate:
                return Choice(depths, rate)
        return Choice(mean.depths(k), mean.rates[k])

    def _look(self, mean: View, best: Choice) -> None:
        """Weigh thresholds on confidence against the best fixed depth."""
        self.stopping.look(
            Outlook(
                first=mean.acceptance[0][0],
                fixed=best.depths[0],
                deepest=min(max(self.target.cells) - 1, mean.room[0]),
                prices=mean.prices,
                rebuild=self.target.rebuild,
            )
        )

    def report(self) -> DepthReport:
        """For one sequence that goes on as the last ones did."""
        if not self.target.cells:
            return DepthReport(None, 0, 1.0, (), "the plain speed is still being measured")
        most = self.options.draft_max
        seq = self._seqs[0] if self._seqs else -1
        mean = view(
            [self.acceptance.mean(seq)],
            [most],
            self._prices(self.target.mean(most + 2)),
            self.options.draft_min,
        )
        given = self._kept[1][0] if self._kept[1] else 0
        stop = self.stopping.stop
        rate = mean.rate_of((given,)) * self.stopping.gain
        depth = len(stop.p_min) if stop else given
        judged = sum(seen > 0 for seen in self.acceptance.shared.seen)
        reason = self._watchdog.reason
        if reason is None and depth == 0:
            reason = reason_off(mean, min(judged, max(self.target.cells) - 1))
        speed_up = rate * mean.plain if depth else 1.0
        acceptance = tuple(mean.acceptance[0][:judged])
        return DepthReport(1 / mean.plain, depth, speed_up, acceptance, reason)

    # -- learning --------------------------------------------------------------------------------

    def record(self, round_: Round) -> None:
        self.acceptance.tick()
        recorded = self._record_target(round_)
        self._record_draft(self._judge(round_), round_.draft_s)
        self._watchdog.see(round_.judged)
        target_s = round_.target_s + round_.other_s
        self.prober.record(target_s + round_.draft_s, target_s, recorded)

    def _record_target(self, round_: Round) -> bool:
        """Whether the time counted: only where llama.cpp could reuse the last decode's graph."""
        if round_.n_prefill or not round_.n_rows:
            self._last_rows = 0
            return False
        same = round_.n_rows == self._last_rows
        self._last_rows = round_.n_rows
        self.target.observe(round_.n_rows, round_.target_s + round_.other_s, same)
        return same

    def _judge(self, round_: Round) -> list[int]:
        """Learn what was accepted; returns how many draft steps each sequence took."""
        limits = dict(zip(self._seqs, self._given, strict=True))
        steps = []
        for one in round_.judged:
            verdicts = [1.0] * one.n_accepted + [0.0] * (one.n_judged - one.n_accepted)
            limit = limits.get(one.seq, Limit(0))
            steps.append(self.stopping.observe(limit, one.confidence, verdicts))
            self.acceptance.judge(one.seq, verdicts)
        return steps

    def _record_draft(self, steps: list[int], seconds: float) -> None:
        """The first draft after a pause catches up on rows: that time is not a draft step's."""
        drafted = any(steps)
        if not drafted:
            self.draft.observe_idle(seconds)
        elif self._last_drafted:
            self.draft.observe(max(steps), sum(steps), seconds)
        self._last_drafted = drafted
