"""Reuse between slots: what is copied, what is kept, who is evicted; both caches together."""

from __future__ import annotations

import dataclasses

import pytest

from gguf_mtp.errors import DecodeError
from gguf_mtp.params import RequestOptions
from tests.support.fakes import FakeMtp, FakeTarget
from tests.unit.test_engine import GREEDY, NO_END, collect, engine_of, greedy

SYSTEM = [7, 7, 3, 1, 9, 2, 4, 4]
FOUR = dataclasses.replace(NO_END, n_seq=4)


def cached(engine, prompt: list[int], n: int = 6) -> int:
    """Answers `prompt`, checks the text, and returns how many of its tokens were found read."""
    [answer], [end] = collect(engine, [prompt], n)
    assert answer == greedy(prompt, n)
    assert end.stats is not None
    return end.stats.cached_tokens


@pytest.mark.parametrize("depth", [0, 2])
def test_a_shared_beginning_is_copied_and_the_source_keeps_the_rest(depth: int) -> None:
    target, mtp = FakeTarget(4), FakeMtp(4)
    engine = engine_of(target, depth, FOUR, mtp)
    first = [*SYSTEM, 1, 2, 3, 5, 8, 1, 3, 2, 1, 3, 4, 5]
    assert cached(engine, first) == 0
    assert cached(engine, [*SYSTEM, 6, 6]) == len(SYSTEM) - 1
    assert cached(engine, [*SYSTEM, 10, 11, 0, 5]) == len(SYSTEM) - 1
    # the first conversation goes on and finds all of itself, though others began like it
    follow_up = [*first, *greedy(first, 6), 9, 9]
    assert cached(engine, follow_up) == len(first) + 6 - 1


def test_without_the_cache_the_whole_prompt_is_read() -> None:
    """And what other slots hold stays for others; another request may go on with this one."""
    engine = engine_of(FakeTarget(4), 2, FOUR)
    first = [*SYSTEM, 1, 2, 3, 5]
    assert cached(engine, first) == 0
    fresh = RequestOptions(cache_prompt=False)
    ends = [c for c in engine.generate([[*first, 8]], GREEDY, 6, fresh) if c.stats]
    assert ends[0].stats is not None
    assert ends[0].stats.cached_tokens == 0
    assert cached(engine, [*first, 9]) == len(first) - 1
    alone = engine_of(FakeTarget(1), 2, dataclasses.replace(NO_END, n_seq=1))
    assert cached(alone, first) == 0
    ends = [c for c in alone.generate([first], GREEDY, 6, fresh) if c.stats]
    assert ends[0].stats is not None
    assert ends[0].stats.cached_tokens == 0


def test_a_beginning_is_copied_from_a_slot_that_is_still_answering() -> None:
    engine = engine_of(FakeTarget(4), 2, FOUR)
    engine.submit([*SYSTEM, 1, 2], GREEDY, 40)
    for _ in range(3):
        engine.step()
    assert cached(engine, [*SYSTEM, 5]) == len(SYSTEM) - 1


def test_nothing_is_copied_from_a_prompt_not_read_yet() -> None:
    limits = dataclasses.replace(FOUR, n_batch=4, n_ctx=64)
    engine = engine_of(FakeTarget(4, n_batch=4), 1, limits)
    engine.submit([*SYSTEM, *SYSTEM], GREEDY, 4)
    engine.step()  # four tokens read
    second = engine.submit([*SYSTEM, 5], GREEDY, 4)
    chunks = []
    while not engine.is_idle:
        chunks += [c for c in engine.step() if c.seq == second]
    assert [t for c in chunks for t in c.tokens] == greedy([*SYSTEM, 5], 4)
    assert chunks[-1].stats is not None
    assert chunks[-1].stats.cached_tokens == 4


def test_the_slot_used_longest_ago_gives_way() -> None:
    limits = dataclasses.replace(NO_END, n_seq=2)
    engine = engine_of(FakeTarget(2), 2, limits)
    one, two, three = [1, 1, 1, 2], [2, 2, 2, 3], [3, 3, 3, 4]
    for prompt in (one, two, one):
        cached(engine, prompt)
    cached(engine, three)  # evicts two
    assert cached(engine, [*one, *greedy(one, 6)]) > 0
    assert cached(engine, two) == 0


def test_a_full_cache_drops_idle_prefixes_and_goes_on() -> None:
    target = FakeTarget(2)
    engine = engine_of(target, 2, dataclasses.replace(NO_END, n_seq=2))
    collect(engine, [[1, 2, 3]], 5)
    target._fail_at = frozenset({len(target.batches) + 1})
    [answer], _ = collect(engine, [[5, 6, 7]], 5)
    assert answer == greedy([5, 6, 7], 5)
    assert cached(engine, [1, 2, 3, *greedy([1, 2, 3], 5)]) == 0  # it was dropped

    target._fail_at = frozenset({len(target.batches) + 1, len(target.batches) + 2})
    with pytest.raises(DecodeError):
        collect(engine, [[8, 8]], 5)
    assert engine.is_idle


def test_acceptance_after_reuse_is_that_of_a_cold_run() -> None:
    prompt = [*SYSTEM, 1, 2, 3]
    follow_up = [*prompt, *greedy(prompt, 6), 9, 9]
    warm = engine_of(FakeTarget(4), 3, FOUR)
    collect(warm, [prompt], 6)
    _, [after] = collect(warm, [follow_up], 30)
    _, [cold] = collect(engine_of(FakeTarget(4), 3, FOUR), [follow_up], 30)
    assert after.stats is not None
    assert cold.stats is not None
    assert after.stats.accepted_per_position == cold.stats.accepted_per_position


def test_idle_prefixes_give_way_while_others_decode() -> None:
    """Of three idle ones of 9 tokens, 20 cells keep two, the last used; alone, all may stay."""
    limits = dataclasses.replace(FOUR, n_idle=20)
    engine = engine_of(FakeTarget(4), 2, limits)
    idle = [[n, n, n, n] for n in (1, 2, 3)]
    for prompt in idle:
        cached(engine, prompt, 5)
    held = [slot.tokens for slot in engine._slots._slots if slot.tokens]
    assert len(held) == 3
    cached(engine, [9, 9, 9], 5)
    ends = [[*p, *greedy(p, 5)] for p in idle]
    assert cached(engine, [*ends[2], 0]) == 8
    assert cached(engine, [*ends[0], 0]) == 0


def test_what_an_active_sequence_shares_costs_nothing() -> None:
    limits = dataclasses.replace(FOUR, n_idle=4)
    engine = engine_of(FakeTarget(4), 2, limits)
    first = [*SYSTEM, 1]
    cached(engine, first, 2)
    engine.submit([*SYSTEM, 5, 6], GREEDY, 30)
    engine.step()
    held = [slot.tokens for slot in engine._slots._slots if not slot.request and slot.tokens]
    assert held == [[*first, *greedy(first, 2)]]
