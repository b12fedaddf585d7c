"""Rounds that pass without a decision: which ones, what is told of them, and what ends a rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from gguf_mtp.depth import FixedDepth
from gguf_mtp.depth.protocol import DraftRequest, RoundFeedback
from gguf_mtp.drafters.mtp import MtpDrafter
from gguf_mtp.drafters.ngram import NgramDrafter
from gguf_mtp.engine.engine import Engine
from gguf_mtp.engine.request import Request, RoundTimes, SequenceStep, Slot
from gguf_mtp.engine.skip_rounds import SkipRounds
from gguf_mtp.types import DraftLimit
from tests.support.fakes import FakeMtp, FakeTarget
from tests.unit.test_engine import GREEDY, NO_END, collect, greedy
from tests.unit.test_observers import watched

TWO = dataclasses.replace(NO_END, n_seq=2)


class Sleepy(FixedDepth):
    """Drafts `n` tokens in every `every`-th decision, none in the others, and allows long rests."""

    def __init__(self, n: int = 2, every: int = 1 << 30, rest: int = 3) -> None:
        super().__init__(n)
        self.every, self.longest = every, rest
        self.asked: list[tuple[int, ...]] = []
        self.rounds: list[RoundFeedback] = []
        self.is_calm = True

    @property
    def n_skip(self) -> int:
        return self.longest if self.is_calm else 0

    def choose(self, rooms: Sequence[DraftRequest]) -> list[DraftLimit]:
        self.asked.append(tuple(room.seq for room in rooms))
        self.is_calm = len(self.asked) % self.every > 0
        if self.is_calm:
            return [DraftLimit(0, (), "asleep")] * len(rooms)
        return super().choose(rooms)

    def record(self, round_: RoundFeedback) -> None:
        self.rounds.append(round_)


def engine_of(depth: FixedDepth) -> Engine:
    mtp = FakeMtp(2, skill=lambda _: True)  # checks that rows come whole and in order
    return Engine(FakeTarget(2), [MtpDrafter(mtp, 2, 16), NgramDrafter(2)], depth, TWO)


def test_a_rest_is_neither_asked_nor_told_and_then_told_whole() -> None:
    depth = Sleepy()
    engine = engine_of(depth)
    seen = watched(engine)
    [answer], _ = collect(engine, [[1, 2, 3]], 14)
    assert answer == greedy([1, 2, 3], 14)
    assert len(depth.asked) == len(depth.rounds) == 4  # rounds 2, 6, 10 and 14
    assert depth.rounds[0].skipped is None
    reports = [r for r in seen.rounds if r.parts][1:]  # the first one reads the prompt
    assert {r.parts[0].reason for r in reports} == {"asleep"}
    for k, told in enumerate(depth.rounds[1:]):
        passed = reports[4 * k + 1 : 4 * k + 4]
        assert told.skipped
        assert told.skipped.n_rows == 1
        assert list(told.skipped.seconds) == pytest.approx([r.target_s + r.other_s for r in passed])
        assert told.skipped.draft_s == pytest.approx(sum(r.draft_s for r in passed))


def test_what_is_drafted_after_a_rest_follows_from_all_that_passed() -> None:
    depth = Sleepy(every=2)
    engine = engine_of(depth)
    [answer], [end] = collect(engine, [[1, 2, 3]], 40)
    assert answer == greedy([1, 2, 3], 40)
    assert end.stats
    assert end.stats.drafted > 8
    assert end.stats.accepted == end.stats.drafted  # the block is always right


def test_another_sequence_ends_a_rest() -> None:
    depth = Sleepy(rest=100)
    engine = engine_of(depth)
    first = engine.submit([1, 2, 3], GREEDY, 30)
    for _ in range(6):
        engine.step()
    [alone] = depth.asked
    second = engine.submit([4, 5], GREEDY, 3)
    engine.step()  # reads the prompt beside the first one's round: a decode of another shape
    assert len(depth.rounds) == 2
    assert depth.rounds[1].n_prefill
    engine.step()
    both = depth.asked[1]
    assert sorted(both) == [0, 1]
    assert depth.rounds[1].skipped
    assert len(depth.rounds[1].skipped.seconds) == 4
    while not engine.is_idle:
        engine.step()
    assert depth.asked == [alone, both, alone]
    assert {first, second} == {1, 2}


def test_another_request_in_the_same_place_ends_a_rest() -> None:
    depth = Sleepy(rest=100)
    engine = engine_of(depth)
    for prompt in ([1, 2, 3], [6, 7]):
        [answer], _ = collect(engine, [prompt], 5)
        assert answer == greedy(prompt, 5)
    assert len(depth.asked) == 2


@pytest.mark.parametrize(
    ("cost_s", "n_rounds"), [(1e-5, 0), (4e-5, 0), (5e-5, 1), (1e-3, 20), (1.0, 31)]
)
def test_a_rest_is_as_long_as_makes_deciding_cheap(cost_s: float, n_rounds: int) -> None:
    """Half a percent of rounds of 10 ms are 50 us a round."""
    skipping = SkipRounds()
    turn = SequenceStep(Slot(0), Request(1, [1], GREEDY, 9))
    turn.limit = DraftLimit(0)
    skipping.begin([turn], 31, cost_s, 0.01)
    passed = 0
    while skipping.skips([turn]):
        skipping.update(RoundTimes(0.0, 0.01, {"mtp": 0.001}), 0.011)
        passed += 1
    assert passed == n_rounds
    told = skipping.take()
    assert (told is None) == (n_rounds == 0)
    if told:
        assert list(told.seconds) == pytest.approx([0.01] * n_rounds)
        assert told.draft_s == pytest.approx(0.001 * n_rounds)
    assert skipping.take() is None
