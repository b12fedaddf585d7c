"""What observers of an engine are told, on decoders without a model."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from gguf_mtp.depth import FixedDepth
from gguf_mtp.engine.engine import CACHE_FULL, Engine
from gguf_mtp.engine.observers import Fallback, RoundReport, SequenceReport
from tests.support.fakes import FakeMtp, FakeTarget
from tests.unit.test_engine import GREEDY, NO_END, collect, engine_of, greedy


class Seen:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.rounds: list[RoundReport] = []
        self.fallbacks: list[tuple[Fallback, str]] = []

    def round(self, report: RoundReport) -> None:
        self.rounds.append(report)

    def fell_back(self, kind: Fallback, why: str) -> None:
        self.fallbacks.append((kind, why))


def watched(engine: Engine) -> Seen:
    seen = Seen()
    engine.observers.add(seen)
    return seen


def test_every_decode_is_one_report_and_parts_add_up_to_the_answers() -> None:
    limits = dataclasses.replace(NO_END, n_seq=2, n_batch=16)
    target = FakeTarget(2, n_batch=16)
    engine = engine_of(target, 3, limits, FakeMtp(2, n_batch=16))
    seen = watched(engine)
    prompts = [[3, 1, 4, 1, 5], [2, 7]]
    _, ends = collect(engine, prompts, 30)
    assert len(seen.rounds) == len(target.batches)
    assert sum(r.load.n_prefill for r in seen.rounds) == 4 + 1
    for id_, end in enumerate(ends, start=1):
        stats = end.stats
        assert stats is not None
        mine = [p for r in seen.rounds for p in r.parts if p.request == id_]
        assert len(mine) == stats.rounds
        assert sum(p.n_committed for p in mine) == stats.decode_tokens == 30
        assert sum(p.n_drafted for p in mine) == stats.drafted
        assert sum(p.n_accepted for p in mine) == stats.accepted
        assert sum(p.n_judged for p in mine) == sum(stats.judged_per_position)
        assert 0 < stats.accepted < stats.drafted
        assert {p.source for p in mine if p.n_drafted} == {"mtp"}
        assert [p.reason for p in mine] == ["first token"] + ["fixed"] * (len(mine) - 1)
        assert all(p.depth >= p.n_drafted for p in mine)
        assert max(p.depth for p in mine) == 3
        # Near the end fewer tokens may be drafted than the depth decision would like.
        assert mine[-1].depth <= 30 - sum(p.n_committed for p in mine[:-1]) - 1


def test_times_and_load() -> None:
    engine = engine_of(FakeTarget(), 2)
    seen = watched(engine)
    for prompt in ([5, 6, 7], [1, 2]):  # for one slot: the second waits
        engine.submit(prompt, GREEDY, 6)
    engine.step()
    assert seen.rounds[0].load == (2, 3, 1)
    assert seen.rounds[0].parts == [SequenceReport(1, 0, "first token", "", 0, 0, 0, 1)]
    while not engine.is_idle:
        engine.step()
    assert next(r.load.n_waiting for r in seen.rounds if 2 in {p.request for p in r.parts}) == 0
    for report in seen.rounds:
        assert report.target_s == 0.001  # what the fake says
        assert report.seconds > 0
        assert report.draft_s >= 0
    drafting = [r for r in seen.rounds if any(p.n_drafted for p in r.parts)]
    assert all(r.draft_s > 0 for r in drafting)
    # Cells: the last token is certain but not decoded.
    assert seen.rounds[-1].load.n_cells == 2 + 6 - 1


def test_without_a_drafter_the_reason_says_so() -> None:
    engine = Engine(FakeTarget(), [], FixedDepth(0), NO_END)
    seen = watched(engine)
    collect(engine, [[1, 2, 3]], 4)
    parts = [(p.depth, p.reason, p.source) for r in seen.rounds for p in r.parts]
    assert parts == [(0, "first token", "")] + [(0, "off", "")] * 3


def test_fallbacks_are_told_with_their_reason() -> None:
    engine = engine_of(FakeTarget(), 2, mtp=FakeMtp(fail_at=frozenset({3})))
    seen = watched(engine)
    collect(engine, [[1, 2, 3]], 8)
    assert [kind for kind, _ in seen.fallbacks] == ["drafter_failed"]
    assert seen.fallbacks[0][1] == engine.stopped_drafting

    engine = engine_of(FakeTarget(), 2, mtp=FakeMtp(skill=lambda _: False))
    seen = watched(engine)
    for seed in range(40):
        collect(engine, [[seed % 12, 5, 3]], 50)
    assert [kind for kind, _ in seen.fallbacks] == ["never_accepted"]


def test_dropping_idle_prefixes_is_a_fallback() -> None:
    limits = dataclasses.replace(NO_END, n_seq=2)
    engine = engine_of(FakeTarget(2, fail_at=frozenset({12})), 0, limits, FakeMtp(2))
    seen = watched(engine)
    collect(engine, [[1, 2, 3]], 4)  # leaves an idle prefix
    collect(engine, [[7, 8, 9]], 12)
    assert seen.fallbacks == [("cache_full", CACHE_FULL)]


def test_an_observer_that_fails_is_left_out_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(Seen):
        def round(self, report: RoundReport) -> None:
            super().round(report)
            raise KeyError("a bug")

    engine = engine_of(FakeTarget(), 2)
    broken = Broken()
    engine.observers.add(broken)
    seen = watched(engine)
    with caplog.at_level(logging.ERROR):
        [answer], _ = collect(engine, [[3, 1, 4]], 20)
    assert answer == greedy([3, 1, 4], 20)
    assert len(broken.rounds) == 1
    assert len(seen.rounds) > 5
    assert caplog.messages == ["observer Broken failed and was removed"]
