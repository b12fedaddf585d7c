"""One drafter that takes time: what its drafts cost, how often they are right, how far they pay.

For a batch of sequences: the depths with the most expected tokens per second among those whose cost
is known, or for a few rounds others. What a target decode costs is shared by all drafters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gguf_mtp.depth.acceptance import Acceptance
from gguf_mtp.depth.cost_model import DraftCost, TargetCost
from gguf_mtp.depth.early_exit import EarlyExit, ExitOutlook
from gguf_mtp.depth.goodput import DepthChoice, Depths, GoodputEstimate, StepCosts, estimate_goodput
from gguf_mtp.depth.options import DepthOptions
from gguf_mtp.depth.probing import HYSTERESIS, Prober
from gguf_mtp.depth.protocol import DraftResult
from gguf_mtp.types import DraftLimit

_LONGEST_HOLD = 4


class DepthPlan(NamedTuple):
    """What was last decided: depths by sequence, and the estimate they come from."""

    depths: Depths
    mean: GoodputEstimate
    gain: float  # of thresholds over these depths

    @property
    def rate(self) -> float:
        """Expected tokens per second."""
        return self.mean.rate_of(self.depths) * self.gain


class DrafterController:
    """Decides for one drafter; what it has learned lives as long as the engine."""

    def __init__(self, name: str, options: DepthOptions, target: TargetCost) -> None:
        self.name = name
        self.options = options
        self.target = target
        self.draft = DraftCost(is_block=name in options.blocks)
        self.acceptance = Acceptance(options.draft_max)
        self.prober = Prober(target)
        self.stopping = EarlyExit(options.draft_max, options.draft_p_min, options.draft_min)
        self.plan: DepthPlan | None = None
        self._seqs: tuple[int, ...] = ()
        self._room: list[int] = []
        self._hold = 1  # rounds that a choice stands beyond its own, so that their time counts
        self._held = 0  # of those still to come
        self._kept: tuple[tuple[int, ...], Depths] = ((), ())  # the last choice, and for whom
        self._last_drafted = False
        self.is_warm = False  # once it has drafted

    # -- choosing --------------------------------------------------------------------------------

    def choose(self, seqs: tuple[int, ...], room: list[int]) -> list[DraftLimit]:
        """A limit for each sequence; `room[i]` draft tokens fit the i-th one, not all 0."""
        if self._held and seqs == self._seqs and room == self._room:
            self._held -= 1
            return self._limits(self._kept[1], room)
        self._seqs, self._room = seqs, room
        return self._decide(room)

    def pause(self) -> None:
        """Nothing can be drafted in this round; what comes after it is decided anew."""
        self._held, self.plan = 0, None

    def _decide(self, room: list[int]) -> list[DraftLimit]:
        mean = self.estimate(self._seqs, room)
        best = self._best(mean)
        instead = DepthChoice(best.depths, best.rate * self.stopping.gain)
        depths = self.prober.next(self._seqs, mean, instead, lambda: self.optimist(mean))
        if depths is not None:
            self._hold, self._held = 1, 0
            self.plan = DepthPlan(depths, mean, 1.0)
            return [self._named(self.stopping.limit(n), "probe") for n in depths]
        # Without drafts nothing is learned that could change the choice soon.
        self._hold = 1 if any(best.depths) else min(2 * self._hold, _LONGEST_HOLD)
        self._held = self._hold
        self._kept = (self._seqs, best.depths)
        if len(room) == 1:
            self._look(mean, best)
        self.plan = DepthPlan(best.depths, mean, self.stopping.gain if len(room) == 1 else 1.0)
        return self._limits(best.depths, room)

    def _limits(self, depths: Depths, room: list[int]) -> list[DraftLimit]:
        """Thresholds on confidence where those pay, else these depths."""
        stopped = self.stopping.stopped(room[0]) if len(room) == 1 else None
        limits = [stopped] if stopped else [self.stopping.limit(n) for n in depths]
        return [self._named(one, "pays" if one.n else "does not pay") for one in limits]

    def _named(self, limit: DraftLimit, reason: str) -> DraftLimit:
        return DraftLimit(limit.n, limit.p_min, reason, self.name)

    def estimate(self, seqs: Sequence[int], room: Sequence[int]) -> GoodputEstimate:
        """What to expect of all depths that fit."""
        acceptance = [self.acceptance.mean(seq) for seq in seqs]
        prices = self._prices(self.target.mean(len(room) + sum(room) + 1))
        return estimate_goodput(acceptance, room, prices, self.options.draft_min)

    def optimist(self, mean: GoodputEstimate) -> GoodputEstimate:
        """The same, as good as it may well be; `mean` is that of the sequences last decided for."""
        acceptance = [
            self.acceptance.high(seq, rates)
            for seq, rates in zip(self._seqs, mean.acceptance, strict=True)
        ]
        prices = self._prices(self.target.low(len(mean.room) + sum(mean.room) + 1))
        return estimate_goodput(acceptance, mean.room, prices, self.options.draft_min)

    def _prices(self, target: Sequence[float]) -> StepCosts:
        return StepCosts(target, *self.draft.parts(target[1]), self.draft.idle)

    def _best(self, mean: GoodputEstimate) -> DepthChoice:
        """The best depths among row counts up to the largest measured; the last ones stay unless
        others are clearly better."""
        k = mean.best(max(self.target.cells) - len(mean.room))
        seqs, depths = self._kept
        if seqs == self._seqs and mean.fits(depths):
            rate = mean.rate_of(depths)
            if mean.rates[k] <= HYSTERESIS * rate:
                return DepthChoice(depths, rate)
        return DepthChoice(mean.depths(k), mean.rates[k])

    def _look(self, mean: GoodputEstimate, best: DepthChoice) -> None:
        """Weigh thresholds on confidence against the best fixed depth."""
        self.stopping.look(
            ExitOutlook(
                seq=self._seqs[0],
                first=mean.acceptance[0][0],
                fixed=best.depths[0],
                deepest=min(max(self.target.cells) - 1, mean.room[0]),
                prices=mean.prices,
                rebuild=self.target.rebuild,
            )
        )

    @property
    def depth(self) -> int:
        """Of the first sequence's drafts, where neither probes nor free drafts interfere."""
        if self.stopping.stop:
            return len(self.stopping.stop.p_min)
        return self._kept[1][0] if self._kept[1] else 0

    def outlook(self) -> DepthPlan:
        """For one sequence that goes on as the last ones did, with all the room there may be."""
        seq = self._seqs[0] if self._seqs else -1
        mean = self.estimate([seq], [self.options.longest(self.name)])
        given = self._kept[1][0] if self._kept[1] else 0
        return DepthPlan((given,), mean, self.stopping.gain)

    # -- learning --------------------------------------------------------------------------------

    def record(self, drafts: Sequence[tuple[DraftResult, DraftLimit]], seconds: float) -> None:
        """Learn from a round's drafts, each with the limit it was made under; this drafter's took
        `seconds`. Those of others say nothing of it."""
        self.acceptance.tick()
        steps = []
        for one, limit in drafts:
            if limit.source != self.name:
                self.acceptance.judge(one.seq, ())
                continue
            verdicts = [1.0] * one.n_accepted + [0.0] * (one.n_judged - one.n_accepted)
            steps.append(self.stopping.observe(one.seq, limit, one.confidence, verdicts))
            self.acceptance.judge(one.seq, verdicts)
        self._record_draft(steps, seconds)

    def _record_draft(self, steps: list[int], seconds: float) -> None:
        """The first draft after a pause catches up on rows: that time is not a draft step's."""
        drafted = any(steps)
        self.is_warm |= drafted
        if not drafted:
            self.draft.observe_idle(seconds)
        elif self._last_drafted:
            self.draft.observe(max(steps), sum(steps), seconds)
        self._last_drafted = drafted

    def skip(self, n_rounds: int, seconds: float) -> None:
        """So many rounds passed without a decision, and the drafters took `seconds` in all."""
        self.acceptance.tick(n_rounds)
        self._held = max(self._held - n_rounds, 0)
        self.draft.observe_idle(seconds, n_rounds)
        self._last_drafted = False

    def forget(self, seq: int) -> None:
        self.acceptance.forget(seq)
        self.stopping.forget(seq)
