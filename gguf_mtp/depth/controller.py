"""Automatic depth: draft as far as it pays on the text at hand, and not at all where it does not.

Every round: learn what the last one cost and what was accepted, then take what promises the most
tokens per second. One of the drafters that take time leads: it drafts for the whole batch, as its
steps are shared. The free drafts of those that are free are sent wherever they promise more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gguf_mtp.depth.acceptance import Acceptance, Rates
from gguf_mtp.depth.confidence import Calibration
from gguf_mtp.depth.cost_model import DraftCost, TargetCost
from gguf_mtp.depth.drafter_controller import DrafterController
from gguf_mtp.depth.drafter_selector import DrafterSelector
from gguf_mtp.depth.goodput import StepCosts, estimate_goodput
from gguf_mtp.depth.ngram_arbiter import FREE_DRAFT, Baseline, NgramArbiter
from gguf_mtp.depth.options import DepthOptions
from gguf_mtp.depth.probing import Prober
from gguf_mtp.depth.protocol import DraftRequest, RoundFeedback, SkippedRounds
from gguf_mtp.depth.report import DepthReport, report_of
from gguf_mtp.depth.watchdog import Watchdog
from gguf_mtp.types import DraftLimit

_SURE = 0.04  # relative error of the plain time at which trying depths begins
_PLAIN_ROUNDS = 8  # recorded before that at most
_FIRST_SKIP, _LONGEST_SKIP = 7, 31  # rounds that may pass undecided where nobody drafts


class DrafterKnowledge(NamedTuple):
    """What is known of one drafter that takes time."""

    draft: DraftCost
    shared: Rates
    calibration: Calibration


class LearnedState(NamedTuple):
    """What outlives an engine (`warm_start` stores it): the target's times, and by drafter what is
    known of it."""

    target: TargetCost
    skills: Mapping[str, DrafterKnowledge]
    free_drafts: Mapping[str, Calibration]


class AutoDepth:
    """The depth decision of one engine; what it has learned lives as long as the engine."""

    def __init__(self, options: DepthOptions | None = None) -> None:
        self.options = options or DepthOptions()
        self.target = TargetCost()
        self.controllers: dict[str, DrafterController] = {}
        self.arbiter = NgramArbiter(self.options, self.target)
        self._selector = DrafterSelector()
        self._watchdog = Watchdog()
        self._active: DrafterController | None = None
        self._seqs: tuple[int, ...] = ()
        self._given: list[DraftLimit] = []
        self._last_rows = 0
        self._n_skip = 0

    def warm_start(self, learned: LearnedState) -> None:
        """Begin with what another run has learned instead of with plain rounds."""
        self.target = learned.target
        self.arbiter = NgramArbiter(self.options, self.target)
        self.controllers = {}
        for name, skill in learned.skills.items():
            controller = self.controller(name)
            skill.draft.is_block = controller.draft.is_block
            controller.draft, controller.stopping.calibration = skill.draft, skill.calibration
            controller.acceptance = Acceptance(self.options.draft_max, skill.shared)
        for name, calibration in learned.free_drafts.items():
            self.arbiter.acceptance_of(name).calibration = calibration

    def controller(self, name: str) -> DrafterController:
        """What is known of a drafter that takes time; of a new one, nothing."""
        if name not in self.controllers:
            self.controllers[name] = DrafterController(name, self.options, self.target)
        return self.controllers[name]

    @property
    def n_max(self) -> int:
        return self.options.draft_max

    @property
    def n_max_free(self) -> int:
        return self.options.longest_free

    @property
    def given_up(self) -> Mapping[str, str]:
        return self._watchdog.given_up

    @property
    def n_skip(self) -> int:
        """None while something is tried or drafted; then ever longer."""
        return self._n_skip

    @property
    def prober(self) -> Prober:
        """Of the drafter that leads."""
        return (self._active or self.controller("")).prober

    def forget(self, seq: int) -> None:
        for controller in self.controllers.values():
            controller.forget(seq)
        for free_drafts in self.arbiter.known.values():
            free_drafts.forget(seq)
        self._last_rows = 0  # the next decode follows a prompt
        self._n_skip = min(self._n_skip, _FIRST_SKIP)  # of another text

    # -- choosing --------------------------------------------------------------------------------

    def choose(self, requests: Sequence[DraftRequest]) -> list[DraftLimit]:
        self._seqs = tuple([one.seq for one in requests])
        is_starting = self._is_starting(len(requests))
        self._given = self._choose(requests, is_starting)
        is_busy = is_starting or any(one.n for one in self._given)
        is_calm = not is_busy and (self._active is None or self._active.prober.probe is None)
        self._n_skip = min(2 * self._n_skip + 1, _LONGEST_SKIP) if is_calm else 0
        return self._given

    def _choose(self, requests: Sequence[DraftRequest], is_starting: bool) -> list[DraftLimit]:
        active, room = self._active_for(requests)
        if active is None or is_starting:
            for controller in self.controllers.values():
                controller.pause()
            reason = "measuring plain speed" if is_starting else "nothing to draft"
            limits = [DraftLimit(0, (), reason)] * len(requests)
            if is_starting:
                return limits
        else:
            limits = active.choose(self._seqs, room)
        if any(one.free_draft for one in requests):
            base = self._base(active, len(requests))
            limits = self.arbiter.over(requests, limits, base, self._last_rows)
        return limits

    def _is_starting(self, n_seqs: int) -> bool:
        """Whether plain rounds must be measured first: as many as their scatter asks for."""
        cells = self.target.cells
        if not cells or n_seqs > max(cells):
            return True
        if len(cells) > 1 or n_seqs not in cells:
            return False
        return cells[n_seqs].n < _PLAIN_ROUNDS and self.target.spread(n_seqs) > _SURE

    def _active_for(
        self, requests: Sequence[DraftRequest]
    ) -> tuple[DrafterController | None, list[int]]:
        """Who drafts for those sequences whose free drafts are not sent, and how far it may for
        each; None when nobody can draft anything."""
        names: dict[str, None] = {}  # in order of preference
        for one in requests:
            free = one.free_draft.source if one.free_draft else None
            for name in one.drafters:
                if name != free and name not in self.given_up:
                    names[name] = None
        candidates = [self.controller(name) for name in names]
        spaces = [self._space(controller.name, requests) for controller in candidates]
        able = [i for i, space in enumerate(spaces) if any(space)]
        if not able:
            return None, []
        i = able[0]
        if len(able) > 1:
            i = able[
                self._selector.winner(
                    [candidates[j] for j in able], self._seqs, [spaces[j] for j in able]
                )
            ]
        self._active = candidates[i]
        return candidates[i], spaces[i]

    def _space(self, name: str, requests: Sequence[DraftRequest]) -> list[int]:
        most = self.options.longest(name)
        return [min(one.n_max, most) if name in one.drafters else 0 for one in requests]

    def _base(self, active: DrafterController | None, n_seqs: int) -> Baseline:
        if active is not None and active.plan is not None:
            return Baseline(active.plan.mean, active.plan.depths, active.plan.rate)
        prices = StepCosts(self.target.mean(n_seqs + 1), 0.0, 0.0, 0.0, 0.0)
        mean = estimate_goodput([[]] * n_seqs, [0] * n_seqs, prices, 0)
        return Baseline(mean, (0,) * n_seqs, n_seqs / mean.plain)

    def report(self) -> DepthReport:
        """For one sequence that goes on as the last ones did."""
        return report_of(self.target, self._active, self.arbiter, self.given_up)

    # -- learning --------------------------------------------------------------------------------

    def record(self, feedback: RoundFeedback) -> None:
        if feedback.skipped:
            self._record_skipped(feedback.skipped)
        recorded = self._record_target(feedback)
        limits = dict(zip(self._seqs, self._given, strict=True))
        drafts = [(one, limits.get(one.seq, DraftLimit(0))) for one in feedback.judged]
        was_warm = self._active is None or self._active.is_warm
        for controller in self.controllers.values():
            spent = feedback.seconds_of.get(controller.name, 0.0)
            controller.record(drafts, spent if feedback.seconds_of else feedback.draft_s)
        for free_draft in feedback.free_drafts:
            self.arbiter.acceptance_of(free_draft.source).judge(free_draft)
        self._watchdog.update(feedback)
        is_sent = any(limit.reason == FREE_DRAFT for limit in self._given)
        if self._active is not None and not is_sent:  # else the round was not what it planned
            target_s = feedback.target_s + feedback.other_s
            draft_s = feedback.draft_s
            if not was_warm:  # buffers are allocated, weights read from the disk: once
                draft_s = min(draft_s, self.target.mean(len(self._seqs) + 1)[-1])
            self._active.prober.record(target_s + draft_s, target_s, recorded)

    def _record_skipped(self, skipped: SkippedRounds) -> None:
        """Plain rounds like the one before them, in which nothing else was to be learned."""
        n_rounds = len(skipped.seconds)
        for seconds in skipped.seconds:
            self.target.observe(skipped.n_rows, seconds, same_shape=True)
        for controller in self.controllers.values():
            controller.skip(n_rounds, skipped.draft_s)
        self._selector.skip(n_rounds)
        if self._active is not None:
            self._active.prober.skip(n_rounds, sum(skipped.seconds) + skipped.draft_s)

    def _record_target(self, feedback: RoundFeedback) -> bool:
        """Whether the time counted: only where llama.cpp could reuse the last decode's graph."""
        rows, seconds = feedback.n_rows, feedback.target_s + feedback.other_s
        if feedback.n_prefill or not rows:
            self._last_rows = 0
            return False
        same = rows == self._last_rows
        self._last_rows = rows
        self.target.observe(rows, seconds, same)
        if (
            feedback.free_drafts
            and not same
            and self.target.cells
            and rows not in self.target.cells
        ):
            self.target.guess(rows, seconds)  # free drafts come and go: a second round is not sure
        return same
