"""Several drafters in one engine: who is asked, what a failure leaves, what the depth is told."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

import pytest

from gguf_mtp.depth import FixedDepth
from gguf_mtp.depth.protocol import DraftRequest, RoundFeedback
from gguf_mtp.drafters.draft_model import ModelDrafter
from gguf_mtp.drafters.mtp import MtpDrafter
from gguf_mtp.drafters.ngram import NgramDrafter
from gguf_mtp.engine.engine import Engine
from gguf_mtp.params import RequestOptions
from gguf_mtp.types import Drafter, DraftLimit
from tests.support.fakes import FakeMtp, FakeTarget
from tests.unit.test_engine import GREEDY, NO_END, collect, greedy
from tests.unit.test_observers import watched

TWO = dataclasses.replace(NO_END, n_seq=2)
CIRCLE = [3, 1, *greedy([3, 1], 20), 3, 1]  # ends as it began: the law then repeats it


class Listens(FixedDepth):
    """Keeps what it is asked and told."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.rooms: list[DraftRequest] = []
        self.rounds: list[RoundFeedback] = []

    def choose(self, rooms: Sequence[DraftRequest]) -> list[DraftLimit]:
        self.rooms += rooms
        return super().choose(rooms)

    def record(self, round_: RoundFeedback) -> None:
        self.rounds.append(round_)
        super().record(round_)


def drafters(mtp: FakeMtp | None = None, model: FakeTarget | None = None) -> dict[str, Drafter]:
    return {
        "ngram": NgramDrafter(2),
        "mtp": MtpDrafter(mtp or FakeMtp(2), 2, 16),
        "model": ModelDrafter(model or FakeTarget(2), 16),
    }


def engine_of(names: str, depth: FixedDepth, made: dict[str, Drafter] | None = None) -> Engine:
    made = made or drafters()
    return Engine(FakeTarget(2), [made[name] for name in names.split(",")], depth, TWO)


def test_each_is_offered_to_the_depth_in_its_order() -> None:
    depth = Listens(2)
    engine = engine_of("ngram,mtp,model", depth)
    collect(engine, [[1, 2, 3], CIRCLE], 4)
    without = [room for room in depth.rooms if room.free_draft is None]
    offered = [room for room in depth.rooms if room.free_draft]
    assert {tuple(room.drafters) for room in without} == {("mtp", "model")}
    assert {tuple(room.drafters) for room in offered} == {("ngram", "mtp", "model")}
    for room in offered:
        assert room.free_draft
        assert room.free_draft.source == "ngram"
        assert 0 < len(room.free_draft.confidence) <= min(room.n_max, 2)


def test_offers_are_judged_whoever_drafts() -> None:
    depth = Listens(1)
    engine = engine_of("mtp,ngram", depth)  # the block is preferred: no offer is sent
    [answer], [end] = collect(engine, [CIRCLE], 10)
    assert answer == greedy(CIRCLE, 10)
    assert end.stats
    assert set(end.stats.by_drafter) == {"mtp"}
    offers = [offer for round_ in depth.rounds for offer in round_.free_drafts]
    assert len(offers) > 3
    for offer in offers:  # the text goes in circles: every copy would have been right
        assert offer.source == "ngram"
        assert offer.n_accepted == offer.n_judged > 0


def test_a_wrong_offer_is_judged_wrong_at_its_first_token() -> None:
    depth = Listens(2)
    engine = engine_of("mtp,ngram", depth)
    first, second = greedy([5, 3, 1], 2)  # the first one comes with the prompt
    collect(engine, [[1, first, (second + 1) % 12, 5, 3, 1]], 4)
    offer = depth.rounds[0].free_drafts[0]
    assert (offer.n_accepted, offer.n_judged) == (0, 1)


def test_seconds_are_told_by_drafter() -> None:
    depth = Listens(2)
    collect(engine_of("mtp,ngram", depth), [[1, 2, 3]], 8)
    for round_ in depth.rounds:
        assert set(round_.seconds_of) == {"mtp", "ngram"}
        assert sum(round_.seconds_of.values()) == pytest.approx(round_.draft_s)


@pytest.mark.parametrize(
    ("wish", "used"),
    [(None, {"mtp"}), (("model",), {"model"}), (("ngram",), {"ngram"}), ((), set())],
)
def test_a_request_is_served_by_those_it_names(
    wish: tuple[str, ...] | None, used: set[str]
) -> None:
    engine = engine_of("mtp,ngram,model", FixedDepth(2))
    beside = engine.submit([7, 8], GREEDY, 12)
    asked = engine.submit(CIRCLE, GREEDY, 12, RequestOptions(draft=wish))
    found = {}
    while not engine.is_idle:
        for chunk in engine.step():
            if chunk.stats:
                found[chunk.seq] = set(chunk.stats.by_drafter)
    assert found == {beside: {"mtp"}, asked: used}


@pytest.mark.parametrize("n", range(1, 10))
def test_one_that_fails_leaves_the_others_working(n: int, caplog: pytest.LogCaptureFixture) -> None:
    made = drafters(mtp=FakeMtp(2, fail_at=frozenset({n})))
    engine = engine_of("mtp,model,ngram", FixedDepth(2), made)
    seen = watched(engine)
    [answer, _], [end, _] = collect(engine, [[3, 1, 4], [9, 9]], 30)
    assert answer == greedy([3, 1, 4], 30)
    assert engine.drafting.names == ("model", "ngram")
    assert engine.is_drafting
    assert engine.stopped_drafting is None
    assert [kind for kind, _ in seen.fallbacks] == ["drafter_failed"]
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert caplog.messages[0].startswith("drafter mtp is disabled: the drafter failed")
    assert end.stats
    assert end.stats.by_drafter["model"][0] > 3


def test_when_the_last_one_fails_drafting_is_off() -> None:
    made = drafters(FakeMtp(2, fail_at=frozenset({2})), FakeTarget(2, fail_at=frozenset({3})))
    engine = engine_of("mtp,model", FixedDepth(2), made)
    [answer], _ = collect(engine, [[3, 1, 4]], 30)
    assert answer == greedy([3, 1, 4], 30)
    assert not engine.is_drafting
    assert engine.drafting.names == ()
    assert engine.stopped_drafting
    assert "the drafter failed" in engine.stopped_drafting


def test_one_that_is_never_right_is_given_up_and_the_next_one_drafts() -> None:
    made = drafters(mtp=FakeMtp(2, skill=lambda _: False))
    limits = dataclasses.replace(TWO, n_ctx=400)
    engine = Engine(FakeTarget(2), [made["mtp"], made["model"]], FixedDepth(1), limits)
    [answer], [end] = collect(engine, [[3, 1, 4]], 300)
    assert answer == greedy([3, 1, 4], 300)
    assert engine.drafting.names == ("model",)
    assert end.stats
    assert end.stats.by_drafter["mtp"] == [64, 64, 0]
    drafts, drafted, accepted = end.stats.by_drafter["model"]
    assert drafts == drafted == accepted > 50


def test_a_draft_model_that_cannot_rewind_is_left_out() -> None:
    made = drafters(model=FakeTarget(2, can_rewind=False))
    engine = engine_of("model,mtp", FixedDepth(2), made)
    [answer], _ = collect(engine, [[3, 1, 4]], 30)
    assert answer == greedy([3, 1, 4], 30)
    assert engine.drafting.names == ("mtp",)
