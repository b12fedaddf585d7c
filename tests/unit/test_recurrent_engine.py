"""The loop over a cache that cannot go back as it likes: ends, failures, what is found again."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from gguf_mtp.depth import FixedDepth
from gguf_mtp.drafters.mtp import MtpDrafter
from gguf_mtp.drafters.ngram import NgramDrafter
from gguf_mtp.engine.engine import Engine
from gguf_mtp.errors import DecodeError, SavedStateError
from tests.support.fakes import FakeMtp, FakeTarget
from tests.support.storm import GREEDY, Storm
from tests.unit.test_engine import NO_END, collect, greedy
from tests.unit.test_storm import Whim, drafters_of, fake_prompt

N = 3
END = 4
LIMITS = dataclasses.replace(NO_END, n_seq=3, n_ctx=64, n_batch=24, end_tokens=frozenset([END]))


def ended(prompt: Sequence[int], n: int) -> list[int]:
    """What the fake answers until its end token."""
    answer = greedy(prompt, n)
    return answer[: answer.index(END)] if END in answer else answer


def engine_of(target: FakeTarget, depth: int, n_seq: int = 3) -> Engine:
    drafters = [MtpDrafter(FakeMtp(n_seq, n_batch=24), n_seq, 24), NgramDrafter(n_seq)]
    limits = dataclasses.replace(LIMITS, n_seq=n_seq)
    return Engine(target, drafters, FixedDepth(depth), limits)


def cached(engine: Engine, prompt: list[int], n: int = 12) -> int:
    [answer], [end] = collect(engine, [prompt], n)
    assert answer == ended(prompt, n)
    assert end.stats is not None
    return end.stats.cached_tokens


def prompt_that_ends(n_most: int) -> list[int]:
    """One whose answer ends by itself after a token at least, and within `n_most`."""
    prompts = ([a, b, 7] for a in range(12) for b in range(12))
    return next(p for p in prompts if 1 < len(ended(p, n_most + 1)) <= n_most)


@pytest.mark.parametrize("depth", range(N + 1))
def test_a_conversation_goes_on_from_an_answer_that_ended(depth: int) -> None:
    prompt = prompt_that_ends(12)
    engine = engine_of(FakeTarget(3, n_kept=N), depth)
    cached(engine, prompt)
    told = [*prompt, *ended(prompt, 12)]
    assert cached(engine, [*told, END, 1, 2]) == len(told)
    beginning = told[:-1]  # cannot be gone back to
    assert cached(engine, [*beginning, (told[-1] + 1) % 12, 1]) == 0


@pytest.mark.parametrize("depth", [0, N])
def test_the_same_prompt_again_is_decoded_at_its_end(depth: int) -> None:
    prompt = prompt_that_ends(12)
    told = [*prompt, *ended(prompt, 12)]
    attention = engine_of(FakeTarget(3), depth)
    cached(attention, prompt)
    assert cached(attention, told) == len(told) - 1  # its last row gives the next token
    states = engine_of(FakeTarget(3, n_kept=N), depth)
    cached(states, prompt)
    assert cached(states, told) == 0


def test_another_sequence_goes_on_from_an_answer_that_ended() -> None:
    prompt = prompt_that_ends(12)
    engine = engine_of(FakeTarget(3, n_kept=N), 2)
    cached(engine, prompt)
    told = [*prompt, *ended(prompt, 12)]
    prompts = [[*told, END, 1, 2], [*told, END, 5, 6]]
    ids = [engine.submit(p, GREEDY, 8) for p in prompts]
    found: dict[int, list[int]] = {id_: [] for id_ in ids}
    n_cached = []
    while not engine.is_idle:
        for chunk in engine.step():
            found[chunk.seq] += chunk.tokens
            if chunk.stats:
                n_cached.append(chunk.stats.cached_tokens)
    assert [found[id_] for id_ in ids] == [ended(p, 8) for p in prompts]
    assert max(n_cached) == len(told)


@pytest.mark.parametrize("n_kept", [None, N])
def test_an_answer_that_ended_is_saved_whole(n_kept: int | None) -> None:
    prompt = prompt_that_ends(12)
    engine = engine_of(FakeTarget(1, n_kept=n_kept), 2, n_seq=1)
    cached(engine, prompt)
    told = [*prompt, *ended(prompt, 12)]
    data = engine.save(told)
    cached(engine, [9, 9, 9, 1])
    assert engine.restore(data) == told
    assert cached(engine, [*told, END, 3, 1]) == len(told)


def test_a_beginning_that_is_not_kept_cannot_be_saved() -> None:
    prompt = prompt_that_ends(12)
    engine = engine_of(FakeTarget(1, n_kept=N), 2, n_seq=1)
    cached(engine, prompt)
    with pytest.raises(SavedStateError, match="cannot save the first 2 tokens: not kept"):
        engine.save(prompt[:2])
    told = [*prompt, *ended(prompt, 12)]
    assert cached(engine, [*told, END, 3, 1]) == len(told)  # and is there still


@pytest.mark.parametrize("fail_at", [1, 2, 3])
@pytest.mark.parametrize("depth", [0, 2])
def test_a_sequence_lost_with_a_failed_decode_is_read_again(depth: int, fail_at: int) -> None:
    prompts = [[1, 2, 3, 9, 1, 2], [5, 5, 6, 7]]
    target = FakeTarget(2, n_batch=24, n_kept=N, fail_at=frozenset([fail_at]))
    engine = engine_of(target, depth, n_seq=2)
    ids = [engine.submit(p, GREEDY, 9) for p in prompts]
    found: dict[int, list[int]] = {id_: [] for id_ in ids}
    n_failed = 0
    while not engine.is_idle:
        try:
            for chunk in engine.step():
                found[chunk.seq] += chunk.tokens
        except DecodeError:
            n_failed += 1
    assert n_failed == 1
    assert [found[id_] for id_ in ids] == [ended(p, 9) for p in prompts]
    assert set(engine.drafting.names) == {"mtp", "ngram"}


def test_what_was_drafted_from_in_a_failed_round_is_not_taken_for_read() -> None:
    """The next prompt has another token where the draft began; `FakeMtp` would notice."""
    prompt = [1, 2, 3, 9, 1, 2]
    target = FakeTarget(1, n_batch=24, fail_at=frozenset([2]))
    mtp = MtpDrafter(FakeMtp(1, n_batch=24), 1, 24)
    engine = Engine(target, [mtp], FixedDepth(2), dataclasses.replace(LIMITS, n_seq=1))
    id_ = engine.submit(prompt, GREEDY, 20)
    answer = [t for chunk in engine.step() for t in chunk.tokens]
    with pytest.raises(DecodeError):
        engine.step()
    engine.cancel(id_)
    told = [*prompt, *answer]
    assert cached(engine, [*told[:-1], (told[-1] + 1) % 12, 2, 2]) == len(told) - 2


@pytest.mark.parametrize("lineup", ["mtp", "ngram", "ngram,mtp", "model,mtp,ngram"])
@pytest.mark.parametrize("n_kept", [None, N])
def test_any_order_of_events(
    lineup: str, n_kept: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Storm` checks after each that caches and drafters hold what is certain."""
    four = dataclasses.replace(LIMITS, n_seq=4)
    for seed in range(4):
        target = FakeTarget(4, n_batch=24, n_kept=n_kept)
        whim = Whim(N, seed)
        monkeypatch.setattr(whim, "record", lambda _: None)  # it reckons without ends
        engine = Engine(target, drafters_of(lineup), whim, four)
        storm = Storm(engine, ended, fake_prompt, seed)
        storm.run(600)
        assert storm.n_finished > 20
