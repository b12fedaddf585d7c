"""Automatic depth: draft as far as it pays on the text at hand, and not at all where it does not.

Every round: learn what the last one cost and what was accepted, then take what promises the most
tokens per second. One of the drafters that take time leads: it drafts for the whole batch, as its
steps are shared. The offers of those that are free are sent wherever they promise more.
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
from gguf_mtp.depth.ngram_arbiter import Baseline, NgramArbiter
from gguf_mtp.depth.options import DepthOptions
from gguf_mtp.depth.probing import Prober
from gguf_mtp.depth.protocol import DraftRequest, RoundFeedback, SkippedRounds
from gguf_mtp.depth.report import DepthReport, report_of
from gguf_mtp.depth.watchdog import Watchdog
from gguf_mtp.types import DraftLimit

_SURE = 0.04  # relative error of the plain time at which trying depths begins
_PLAIN_ROUNDS = 8  # recorded before that at most
_FIRST_REST, _LONGEST_REST = 7, 31  # rounds that may pass undecided where nobody drafts


class DrafterKnowledge(NamedTuple):
    """What is known of one drafter that takes time."""

    draft: DraftCost
    shared: Rates
    calibration: Calibration


class LearnedState(NamedTuple):
    """What outlives an engine (`state.py` stores it): the target's times, and by drafter what is
    known of it."""

    target: TargetCost
    skills: Mapping[str, DrafterKnowledge]
    offers: Mapping[str, Calibration]


class AutoDepth:
    """The depth decision of one engine; what it has learned lives as long as the engine."""

    def __init__(self, options: DepthOptions | None = None) -> None:
        self.options = options or DepthOptions()
        self.target = TargetCost()
        self.sources: dict[str, DrafterController] = {}
        self.exchange = NgramArbiter(self.options, self.target)
        self._contest = DrafterSelector()
        self._watchdog = Watchdog()
        self._lead: DrafterController | None = None
        self._seqs: tuple[int, ...] = ()
        self._given: list[DraftLimit] = []
        self._last_rows = 0
        self._rest = 0

    def warm_start(self, learned: LearnedState) -> None:
        """Begin with what another run has learned instead of with plain rounds."""
        self.target = learned.target
        self.exchange = NgramArbiter(self.options, self.target)
        self.sources = {}
        for name, skill in learned.skills.items():
            source = self.source(name)
            source.draft, source.stopping.calibration = skill.draft, skill.calibration
            source.acceptance = Acceptance(self.options.draft_max, skill.shared)
        for name, calibration in learned.offers.items():
            self.exchange.offers_of(name).calibration = calibration

    def source(self, name: str) -> DrafterController:
        """What is known of a drafter that takes time; of a new one, nothing."""
        if name not in self.sources:
            self.sources[name] = DrafterController(name, self.options, self.target)
        return self.sources[name]

    @property
    def n_max(self) -> int:
        return self.options.draft_max

    @property
    def given_up(self) -> Mapping[str, str]:
        return self._watchdog.given_up

    @property
    def rest(self) -> int:
        """None while something is tried or drafted; then ever longer."""
        return self._rest

    @property
    def prober(self) -> Prober:
        """Of the drafter that leads."""
        return (self._lead or self.source("")).prober

    def forget(self, seq: int) -> None:
        for source in self.sources.values():
            source.forget(seq)
        for offers in self.exchange.known.values():
            offers.forget(seq)
        self._last_rows = 0  # the next decode follows a prompt
        self._rest = min(self._rest, _FIRST_REST)  # of another text

    # -- choosing --------------------------------------------------------------------------------

    def choose(self, rooms: Sequence[DraftRequest]) -> list[DraftLimit]:
        self._seqs = tuple([one.seq for one in rooms])
        is_starting = self._is_starting(len(rooms))
        self._given = self._choose(rooms, is_starting)
        is_busy = is_starting or any(one.n for one in self._given)
        is_calm = not is_busy and (self._lead is None or self._lead.prober.probe is None)
        self._rest = min(2 * self._rest + 1, _LONGEST_REST) if is_calm else 0
        return self._given

    def _choose(self, rooms: Sequence[DraftRequest], is_starting: bool) -> list[DraftLimit]:
        lead, room = self._lead_of(rooms)
        if lead is None or is_starting:
            for source in self.sources.values():
                source.pause()
            reason = "measuring plain speed" if is_starting else "nothing to draft"
            limits = [DraftLimit(0, (), reason)] * len(rooms)
            if is_starting:
                return limits
        else:
            limits = lead.choose(self._seqs, room)
        if any(one.offer for one in rooms):
            base = self._base(lead, len(rooms))
            limits = self.exchange.over(rooms, limits, base, self._last_rows)
        return limits

    def _is_starting(self, n_seqs: int) -> bool:
        """Whether plain rounds must be measured first: as many as their scatter asks for."""
        cells = self.target.cells
        if not cells or n_seqs > max(cells):
            return True
        if len(cells) > 1 or n_seqs not in cells:
            return False
        return cells[n_seqs].n < _PLAIN_ROUNDS and self.target.spread(n_seqs) > _SURE

    def _lead_of(self, rooms: Sequence[DraftRequest]) -> tuple[DrafterController | None, list[int]]:
        """Who drafts for those sequences whose offers are not sent, and how far it may for each;
        None when nobody can draft anything."""
        names: dict[str, None] = {}  # in order of preference
        for one in rooms:
            free = one.offer.source if one.offer else None
            for name in one.drafters:
                if name != free and name not in self.given_up:
                    names[name] = None
        candidates = [self.source(name) for name in names]
        spaces = [self._space(source.name, rooms) for source in candidates]
        able = [i for i, space in enumerate(spaces) if any(space)]
        if not able:
            return None, []
        i = able[0]
        if len(able) > 1:
            i = able[
                self._contest.winner(
                    [candidates[j] for j in able], self._seqs, [spaces[j] for j in able]
                )
            ]
        self._lead = candidates[i]
        return candidates[i], spaces[i]

    def _space(self, name: str, rooms: Sequence[DraftRequest]) -> list[int]:
        most = self.options.draft_max
        return [min(one.n_max, most) if name in one.drafters else 0 for one in rooms]

    def _base(self, lead: DrafterController | None, n_seqs: int) -> Baseline:
        if lead is not None and lead.plan is not None:
            return Baseline(lead.plan.mean, lead.plan.depths, lead.plan.rate)
        prices = StepCosts(self.target.mean(n_seqs + 1), 0.0, 0.0, 0.0, 0.0)
        mean = estimate_goodput([[]] * n_seqs, [0] * n_seqs, prices, 0)
        return Baseline(mean, (0,) * n_seqs, n_seqs / mean.plain)

    def report(self) -> DepthReport:
        """For one sequence that goes on as the last ones did."""
        return report_of(self.target, self._lead, self.exchange, self.given_up)

    # -- learning --------------------------------------------------------------------------------

    def record(self, round_: RoundFeedback) -> None:
        if round_.rested:
            self._record_rest(round_.rested)
        recorded = self._record_target(round_)
        limits = dict(zip(self._seqs, self._given, strict=True))
        drafts = [(one, limits.get(one.seq, DraftLimit(0))) for one in round_.judged]
        for source in self.sources.values():
            spent = round_.seconds_of.get(source.name, 0.0)
            source.record(drafts, spent if round_.seconds_of else round_.draft_s)
        for offer in round_.offers:
            self.exchange.offers_of(offer.source).judge(offer)
        self._watchdog.see(round_)
        is_sent = any(limit.reason == "offer" for limit in self._given)
        if self._lead is not None and not is_sent:  # else the round was not what it planned
            target_s = round_.target_s + round_.other_s
            self._lead.prober.record(target_s + round_.draft_s, target_s, recorded)

    def _record_rest(self, rested: SkippedRounds) -> None:
        """Plain rounds like the one before them, in which nothing else was to be learned."""
        n_rounds = len(rested.seconds)
        for seconds in rested.seconds:
            self.target.observe(rested.n_rows, seconds, same_shape=True)
        for source in self.sources.values():
            source.rest(n_rounds, rested.draft_s)
        self._contest.rest(n_rounds)
        if self._lead is not None:
            self._lead.prober.rest(n_rounds, sum(rested.seconds) + rested.draft_s)

    def _record_target(self, round_: RoundFeedback) -> bool:
        """Whether the time counted: only where llama.cpp could reuse the last decode's graph."""
        rows, seconds = round_.n_rows, round_.target_s + round_.other_s
        if round_.n_prefill or not rows:
            self._last_rows = 0
            return False
        same = rows == self._last_rows
        self._last_rows = rows
        self.target.observe(rows, seconds, same)
        if round_.offers and not same and self.target.cells and rows not in self.target.cells:
            self.target.guess(rows, seconds)  # offers come and go: a second round is not sure
        return same
