"""Where an answer ends, what a slot has in common with a prompt, what bounds a draft."""

from __future__ import annotations

import pytest

from gguf_mtp.depth import FixedDepth
from gguf_mtp.drafters.mtp import MtpDrafter
from gguf_mtp.engine.config import EngineLimits
from gguf_mtp.engine.engine import Engine
from gguf_mtp.engine.request import Outcome, Slot, cut
from gguf_mtp.params import RequestOptions, SamplingParams
from gguf_mtp.types import Verdict
from tests.support.fakes import FakeMtp, FakeTarget

END = frozenset({0})


@pytest.mark.parametrize(
    ("draft", "verdict", "n_left", "expected"),
    [
        # nothing drafted; all kept; one refused
        ([], Verdict(0, 7), 9, Outcome([7], 0, 0, None)),
        ([5, 6], Verdict(2, 7), 9, Outcome([5, 6, 7], 2, 2, None)),
        ([5, 6, 4], Verdict(1, 7), 9, Outcome([5, 7], 2, 1, None)),
        # the end comes from the target, drafted right, drafted in the middle
        ([5, 6], Verdict(1, 0), 9, Outcome([5], 2, 1, "stop")),
        ([5, 6], Verdict(2, 0), 9, Outcome([5, 6], 2, 2, "stop")),
        ([5, 0], Verdict(2, 7), 9, Outcome([5], 2, 2, "stop")),
        ([0, 6, 5], Verdict(3, 7), 9, Outcome([], 1, 1, "stop")),
        ([], Verdict(0, 0), 9, Outcome([], 0, 0, "stop")),
        # room runs out: exactly, and the end wins over it
        ([5, 6], Verdict(2, 7), 3, Outcome([5, 6, 7], 2, 2, "length")),
        ([], Verdict(0, 7), 1, Outcome([7], 0, 0, "length")),
        ([5, 6], Verdict(2, 0), 3, Outcome([5, 6], 2, 2, "stop")),
        ([5], Verdict(1, 0), 2, Outcome([5], 1, 1, "stop")),
    ],
)
def test_cut(draft: list[int], verdict: Verdict, n_left: int, expected: Outcome) -> None:
    assert cut(verdict, draft, n_left, END) == expected


@pytest.mark.parametrize(
    ("held", "prompt", "n"),
    [
        ([], [1], 0),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 3], [1, 2], 2),
        ([1, 9], [1, 2], 1),
        ([9], [1], 0),
    ],
)
def test_common_prefix(held: list[int], prompt: list[int], n: int) -> None:
    slot = Slot(0)
    slot.tokens = held
    assert slot.n_common(prompt) == n


def test_a_request_bounds_its_own_drafts_and_no_other() -> None:
    limits = EngineLimits(n_ctx=64, n_seq=3, n_batch=32, end_tokens=frozenset())
    drafter = MtpDrafter(FakeMtp(3), 3, 32)
    engine = Engine(FakeTarget(3), [drafter], FixedDepth(4), limits)
    ids = [
        engine.submit([3, 1, 4], SamplingParams(temperature=0), 20, RequestOptions(draft_max))
        for draft_max in (None, 0, 2)
    ]
    texts, drafted = {id_: [] for id_ in ids}, {}
    while not engine.is_idle:
        for chunk in engine.step():
            texts[chunk.seq] += chunk.tokens
            if chunk.stats:
                drafted[chunk.seq] = chunk.stats
    assert texts[ids[0]] == texts[ids[1]] == texts[ids[2]]  # the bound changes speed, never text
    assert drafted[ids[1]].drafted == 0
    assert len(drafted[ids[2]].judged_per_position) == 2
    assert len(drafted[ids[0]].judged_per_position) == 4


def test_a_request_may_name_tokens_that_end_it() -> None:
    """Drafted or not; they are no part of the answer, as the model's own end tokens."""
    prompt, params = [3, 1, 4], SamplingParams(temperature=0)

    def answer(depth: int, stops: frozenset[int]) -> tuple[list[int], str | None]:
        limits = EngineLimits(n_ctx=64, n_seq=1, n_batch=32, end_tokens=frozenset())
        engine = Engine(FakeTarget(1), [MtpDrafter(FakeMtp(1), 1, 32)], FixedDepth(depth), limits)
        engine.submit(prompt, params, 30, RequestOptions(stop_tokens=stops))
        tokens: list[int] = []
        while not engine.is_idle:
            for chunk in engine.step():
                tokens += chunk.tokens
        return tokens, chunk.finish_reason

    whole, reason = answer(0, frozenset())
    assert reason == "length"
    for depth in (0, 3):
        for stop in set(whole[3:12]):
            expected = whole[: whole.index(stop)]
            assert answer(depth, frozenset({stop, 99})) == (expected, "stop")


def test_logprobs_come_with_every_committed_token() -> None:
    limits = EngineLimits(n_ctx=64, n_seq=1, n_batch=32, end_tokens=frozenset())
    engine = Engine(FakeTarget(1), [MtpDrafter(FakeMtp(1), 1, 32)], FixedDepth(3), limits)
    engine.submit([3, 1, 4], SamplingParams(temperature=0), 20, RequestOptions(n_logprobs=1))
    n_drafted = 0
    while not engine.is_idle:
        for chunk in engine.step():
            n_drafted += chunk.n_from_draft
            entries = chunk.logprobs or []
            assert [e.token for e in entries] == list(chunk.tokens)
            assert all(e.top == [(e.token, e.logprob)] for e in entries)  # greedy
    assert n_drafted > 5
