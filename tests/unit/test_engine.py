"""The engine on decoders without a model: the loop's rules, round by round."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Sequence

import numpy as np
import pytest

from gguf_mtp.depth import FixedDepth
from gguf_mtp.drafters.draft_builder import DraftBuilder
from gguf_mtp.drafters.mtp import MtpDrafter
from gguf_mtp.engine.config import EngineLimits
from gguf_mtp.engine.engine import Engine
from gguf_mtp.errors import BadLogits, ContextFull, DecodeError, RequestError
from gguf_mtp.params import SamplingParams
from gguf_mtp.sampling.chain import SamplingChain
from gguf_mtp.stats import Stats
from gguf_mtp.types import Ask, Chunk, DraftLimit
from tests.support.fakes import N_VOCAB, FakeMtp, FakeTarget, logits_after

GREEDY = SamplingParams(temperature=0)
NO_END = EngineLimits(n_ctx=64, n_seq=1, n_batch=16, end_tokens=frozenset())


def engine_of(
    target: FakeTarget,
    depth: int,
    limits: EngineLimits = NO_END,
    mtp: FakeMtp | None = None,
) -> Engine:
    mtp = mtp or FakeMtp(limits.n_seq)
    drafter = MtpDrafter(mtp, limits.n_seq, limits.n_batch)
    return Engine(target, [drafter], FixedDepth(depth), limits)


def collect(engine: Engine, prompts: list[list[int]], max_tokens: int = 40, params=GREEDY):
    answers: list[list[int]] = [[] for _ in prompts]
    ends: list[Chunk] = [Chunk(0, [], 0)] * len(prompts)
    for chunk in engine.generate(prompts, params, max_tokens):
        answers[chunk.seq] += chunk.tokens
        if chunk.finish_reason:
            ends[chunk.seq] = chunk
    return answers, ends


def greedy(prompt: Sequence[int], n: int, end: frozenset[int] = frozenset()) -> list[int]:
    """Plain decoding, written down."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + n:
        token = int(logits_after(tokens).argmax())
        if token in end:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


@pytest.mark.parametrize("depth", range(7))
def test_text_does_not_depend_on_depth(depth: int) -> None:
    prompt = [3, 1, 4, 1, 5]
    engine = engine_of(FakeTarget(), depth)
    [answer], [end] = collect(engine, [prompt])
    assert answer == greedy(prompt, 40)
    assert end.finish_reason == "length"
    assert end.stats is not None
    assert end.stats.decode_tokens == 40
    assert (end.stats.drafted > 0) == (depth > 0)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_decodes_per_round(depth: int) -> None:
    """One target decode a round, of which the first one reads the prompt too and drafts nothing;
    and as many MTP decodes as tokens drafted: catch-up shares the first one."""
    target, mtp = FakeTarget(), FakeMtp()
    engine = engine_of(target, depth, mtp=mtp)
    _, [end] = collect(engine, [[3, 1, 4]], 37)
    assert end.stats is not None
    assert len(target.batches) == end.stats.rounds
    assert [r.tokens for r in target.batches[0]] == [[3, 1, 4]]
    assert (end.stats.decode_tokens, end.stats.first_tokens) == (37, 1)
    assert end.stats.rounds_per_depth[0] <= (37 if depth == 0 else 2)
    assert len(mtp.batches) == sum(n * r for n, r in enumerate(end.stats.rounds_per_depth))


def test_a_prompt_as_long_as_the_batch_leaves_its_last_token_to_the_next_decode() -> None:
    for n in (15, 16, 17):
        target = FakeTarget(n_batch=16)
        prompt = [i % N_VOCAB for i in range(n)]
        [answer], [end] = collect(engine_of(target, 2), [prompt], 10)
        assert answer == greedy(prompt, 10)
        assert end.stats
        assert end.stats.prefill_tokens == n - 1
        sizes = [sum(len(r.tokens) for r in batch) for batch in target.batches]
        if n == 17:
            assert sizes[:2] == [16, 3]  # the rest is a round like any other
            assert end.stats.first_tokens == 0
        else:
            assert sizes[:2] == [n, 3]
            assert end.stats.first_tokens == 1


def test_the_time_of_the_first_token_is_the_prompts() -> None:
    """Speed is told by the tokens whose time is: of two tokens that is the second."""
    target = FakeTarget()
    [_], [end] = collect(engine_of(target, 0), [[3, 1, 4]], 2)
    assert end.stats
    assert end.stats.target_s == 0.001  # of one decode; the fake says so
    assert end.stats.tokens_per_s == pytest.approx(1 / end.stats.decode_s)


def test_end_token_cuts_text_cache_and_statistics() -> None:
    """Tokens behind the end, though accepted, are nowhere."""
    prompt = [3, 1, 4, 1, 5]
    end_token = greedy(prompt, 12)[9]
    limits = dataclasses.replace(NO_END, end_tokens=frozenset({end_token}))
    expected = greedy(prompt, 40, limits.end_tokens)
    for depth in range(6):
        target = FakeTarget()
        mtp = FakeMtp(skill=lambda _: True)
        [answer], [end] = collect(engine_of(target, depth, limits, mtp), [prompt])
        assert answer == expected
        assert end.finish_reason == "stop"
        assert target.cache[0] == [*prompt, *expected]
        assert end.stats is not None
        assert end.stats.decode_tokens == len(expected)
        assert end.stats.accepted <= len(expected) + 1  # the end token may have been drafted


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_max_tokens_is_exact(depth: int, max_tokens: int) -> None:
    target = FakeTarget()
    [answer], [end] = collect(engine_of(target, depth), [[1, 2]], max_tokens)
    assert (len(answer), end.finish_reason) == (max_tokens, "length")
    assert len(target.cache[0]) == 2 + max_tokens - 1


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
def test_the_context_fills_to_its_last_token(depth: int) -> None:
    limits = dataclasses.replace(NO_END, n_ctx=20)
    [answer], [end] = collect(engine_of(FakeTarget(), depth, limits), [[1, 2, 3]], 1000)
    assert (len(answer), end.finish_reason) == (17, "length")


@pytest.mark.parametrize("depth", [0, 2])
def test_a_prompt_of_one_token(depth: int) -> None:
    [answer], _ = collect(engine_of(FakeTarget(), depth), [[7]], 20)
    assert answer == greedy([7], 20)


def test_a_long_prompt_is_read_in_chunks() -> None:
    target = FakeTarget(n_batch=16)
    prompt = [i % N_VOCAB for i in range(40)]
    [answer], [end] = collect(engine_of(target, 2), [prompt], 10)
    assert answer == greedy(prompt, 10)
    sizes = [sum(len(r.tokens) for r in batch) for batch in target.batches]
    assert sizes[:3] == [16, 16, 8]  # the last row gives the first token
    assert end.stats is not None
    assert end.stats.prefill_tokens == 39


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_sequences_beside_each_other_write_what_each_writes_alone(depth: int) -> None:
    limits = dataclasses.replace(NO_END, n_seq=3)
    prompts = [[1, 2, 3], [i % 11 for i in range(30)], [9], [5, 5], [8, 1, 7, 7, 2]]
    target = FakeTarget(3)
    answers, ends = collect(engine_of(target, depth, limits), prompts, 23)
    assert answers == [greedy(p, 23) for p in prompts]
    assert all(end.finish_reason == "length" for end in ends)
    assert max(len(batch) for batch in target.batches) == 3  # one decode for all of them


def test_a_prompt_read_before_is_not_read_again() -> None:
    target = FakeTarget()
    engine = engine_of(target, 2)
    first = [3, 1, 4, 1, 5]
    [answer], _ = collect(engine, [first], 6)
    follow_up = [*first, *answer, 8, 8]
    target.batches.clear()
    [second], [end] = collect(engine, [follow_up], 9)
    assert second == greedy(follow_up, 9)
    assert end.stats is not None
    # the last shared token is decoded again, the last of the prompt belongs to the first round
    assert end.stats.cached_tokens == len(first) + len(answer) - 1
    assert end.stats.prefill_tokens == 2


def test_a_cache_that_cannot_rewind_is_emptied() -> None:
    target = FakeTarget(can_rewind=False)
    engine = Engine(target, [], FixedDepth(0), NO_END)
    collect(engine, [[1, 2, 3, 4]], 3)
    [answer], [end] = collect(engine, [[1, 2, 9]], 5)
    assert answer == greedy([1, 2, 9], 5)
    assert end.stats is not None
    assert end.stats.cached_tokens == 0


@pytest.mark.parametrize("n_chunks", range(1, 12))
def test_a_consumer_may_leave_after_any_round(n_chunks: int) -> None:
    """The caches then hold exactly what is certain, and the next answer is right."""
    target, mtp = FakeTarget(), FakeMtp()
    engine = engine_of(target, 2, mtp=mtp)
    prompt = [i % N_VOCAB for i in range(20)]
    stream = engine.generate([prompt], GREEDY, 30)
    tokens = [t for _, chunk in zip(range(n_chunks), stream, strict=False) for t in chunk.tokens]
    stream.close()
    assert engine.is_idle
    certain = [*prompt, *tokens][:-1]
    assert target.cache[0] == (certain if tokens else certain[: 16 * n_chunks])
    follow_up = [*prompt, *tokens, 4]
    assert collect(engine, [follow_up], 8)[0] == [greedy(follow_up, 8)]


def test_cancel_in_the_queue_and_of_the_unknown() -> None:
    engine = engine_of(FakeTarget(), 1)
    first, second = (engine.submit([1, 2], GREEDY, 5) for _ in range(2))
    engine.step()
    chunk = engine.cancel(second)
    assert chunk is not None
    assert (chunk.seq, chunk.finish_reason) == (second, "cancelled")
    assert engine.cancel(99) is None
    assert engine.cancel(first) is not None
    assert engine.is_idle
    assert engine.step() == []


def test_cancel_while_the_prompt_is_read() -> None:
    target = FakeTarget(n_batch=16)
    engine = engine_of(target, 2)
    prompt = [i % N_VOCAB for i in range(40)]
    id_ = engine.submit(prompt, GREEDY, 5)
    engine.step()
    engine.cancel(id_)
    [answer], [end] = collect(engine, [prompt], 5)
    assert answer == greedy(prompt, 5)
    assert end.stats is not None
    assert end.stats.cached_tokens == 16


def test_requests_that_make_no_sense() -> None:
    engine = engine_of(FakeTarget(), 1)
    with pytest.raises(RequestError, match="empty"):
        engine.submit([], GREEDY, 5)
    with pytest.raises(RequestError, match="max_tokens is 0"):
        engine.submit([1], GREEDY, 0)
    with pytest.raises(ContextFull, match=r"64 tokens.*holds 64") as error:
        engine.submit([1] * 64, GREEDY, 5)
    assert (error.value.n_prompt, error.value.n_ctx) == (64, 64)
    assert collect(engine, [[1] * 63], 5)[0] == [greedy([1] * 63, 1)]


@pytest.mark.parametrize("n", range(1, 14))
def test_a_failing_drafter_is_left_out_and_the_text_goes_on(
    n: int, caplog: pytest.LogCaptureFixture
) -> None:
    mtp = FakeMtp(fail_at=frozenset({n}))
    engine = engine_of(FakeTarget(), 2, mtp=mtp)
    [answer], _ = collect(engine, [[3, 1, 4]], 30)
    assert answer == greedy([3, 1, 4], 30)
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "the drafter failed" in caplog.text
    assert not engine.is_drafting
    assert engine.stopped_drafting is not None


def test_a_failing_target_moves_nothing() -> None:
    target = FakeTarget(fail_at=frozenset({4}))
    engine = engine_of(target, 2)
    with pytest.raises(DecodeError):
        collect(engine, [[3, 1, 4]], 30)
    assert engine.is_idle
    assert target.n_past(0) >= 3
    assert collect(engine, [[3, 1, 4]], 30)[0] == [greedy([3, 1, 4], 30)]


def test_a_block_that_is_never_right_is_given_up_once(caplog: pytest.LogCaptureFixture) -> None:
    mtp = FakeMtp(skill=lambda _: False)
    engine = engine_of(FakeTarget(), 1, dataclasses.replace(NO_END, n_ctx=400), mtp)
    # a law whose rolled copy never has the same maximum
    [answer], _ = collect(engine, [[3, 1, 4]], 200)
    assert answer == greedy([3, 1, 4], 200)
    assert len(caplog.records) == 1
    assert not engine.is_drafting


def test_statistics_add_up() -> None:
    engine = engine_of(FakeTarget(2), 3, dataclasses.replace(NO_END, n_seq=2))
    _, ends = collect(engine, [[1, 2], [3, 4, 5]], 20)
    total = Stats()
    for end in ends:
        assert end.stats is not None
        s = end.stats
        assert s.judged_per_position[0] >= s.accepted_per_position[0]
        assert s.accepted <= sum(s.judged_per_position) <= s.drafted
        assert s.decode_tokens == s.rounds + s.accepted
        total += s
    assert total == engine.totals


def sampled_pairs(depth: int, n: int, params: SamplingParams) -> np.ndarray:
    """Counts of the 2nd and 3rd sampled token after a fixed prompt: [N_VOCAB, N_VOCAB]."""
    counts = np.zeros((N_VOCAB, N_VOCAB))
    target = FakeTarget(law=lambda tokens: logits_after(tokens, 1.0))
    engine = engine_of(target, depth)
    for seed in range(n):
        seeded = dataclasses.replace(params, seed=seed)
        [[_, second, third]], _ = collect(engine, [[3, 1]], 3, seeded)
        counts[second, third] += 1
    return counts


def exact_pairs(params: SamplingParams) -> np.ndarray:
    """The law of the same two tokens, summed over the first."""
    law, chain = np.zeros((N_VOCAB, N_VOCAB)), SamplingChain(params)

    def dense(tokens: list[int]) -> np.ndarray:
        out = np.zeros(N_VOCAB)
        ids, probs = chain.target_probs(logits_after(tokens, 1.0))
        out[ids] = probs
        return out

    for a, pa in enumerate(dense([3, 1])):
        for b, pb in enumerate(dense([3, 1, a])):
            law[b] += pa * pb * dense([3, 1, a, b])
    return law


@pytest.mark.parametrize("depth", [0, 2])
def test_sampled_law_through_the_whole_loop(depth: int) -> None:
    params = SamplingParams(temperature=0.8, top_k=6, top_p=1.0, min_p=0.0)
    n = 3_000
    counts, law = sampled_pairs(depth, n, params), exact_pairs(params)
    assert counts[law == 0].sum() == 0
    expected = n * law
    rare = (expected > 0) & (expected < 5)
    cells = [(counts[m], expected[m]) for m in [expected >= 5]]
    chi2 = sum(((c - e) ** 2 / e).sum() for c, e in cells)
    chi2 += (counts[rare].sum() - expected[rare].sum()) ** 2 / expected[rare].sum()
    dof = int((expected >= 5).sum())
    assert chi2 < dof + 3.1 * np.sqrt(2 * dof) + 5  # beyond p = 0.001


def test_the_same_seed_gives_the_same_text() -> None:
    params = SamplingParams(temperature=1.0, seed=11)
    texts = [collect(engine_of(FakeTarget(), 2), [[3, 1]], 30, params)[0] for _ in range(2)]
    assert texts[0] == texts[1]
    other = collect(engine_of(FakeTarget(), 2), [[3, 1]], 30, dataclasses.replace(params, seed=12))
    assert other[0] != texts[0]


# -- several readers of one engine --------------------------------------------------------------


@pytest.mark.parametrize("n_seq", [1, 2, 3])
def test_answers_read_in_turn_lose_nothing(n_seq: int) -> None:
    """Whoever's turn it is runs the round; the others' chunks wait for them."""
    limits = dataclasses.replace(NO_END, n_seq=n_seq)
    engine = engine_of(FakeTarget(n_seq), 2, limits)
    prompts = [[3, 1, 4], [2, 7], [5, 5, 5, 6]]
    left = [engine.generate([prompt], GREEDY, 30) for prompt in prompts]
    answers: list[list[int]] = [[], [], []]
    for _ in range(200):
        for answer, chunks in zip(answers, left, strict=True):
            answer += next(chunks, Chunk(0, [], 0)).tokens
    assert answers == [greedy(prompt, 30) for prompt in prompts]
    assert engine.is_idle


def test_a_second_answer_while_the_first_is_held() -> None:
    engine = engine_of(FakeTarget(2), 1, dataclasses.replace(NO_END, n_seq=2))
    held = engine.generate([[3, 1, 4]], GREEDY, 20)
    first = list(next(held).tokens)
    [answer], _ = collect(engine, [[2, 7]], 30)
    assert answer == greedy([2, 7], 30)
    for chunk in held:
        first += chunk.tokens
    assert first == greedy([3, 1, 4], 20)


def test_a_round_that_generate_runs_keeps_the_chunks_of_submitted_requests() -> None:
    engine = engine_of(FakeTarget(2), 1, dataclasses.replace(NO_END, n_seq=2))
    id_ = engine.submit([2, 7], GREEDY, 12)
    collect(engine, [[3, 1, 4]], 30)
    tokens: list[int] = []
    reason = None
    while reason is None:
        for chunk in engine.step():
            assert chunk.seq == id_
            tokens += chunk.tokens
            reason = chunk.finish_reason
    assert tokens == greedy([2, 7], 12)


# -- logits that are no numbers ------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(seed=1), SamplingParams(top_k=0, seed=2)]
)
def test_logits_that_are_no_numbers_end_one_request_in_a_sentence(
    bad: float, params: SamplingParams
) -> None:
    """One sequence's are bad at one place; the other's answer is its own, and so is the next."""
    is_broken = True

    def law(tokens: Sequence[int]) -> np.ndarray:
        logits = logits_after(tokens)
        if is_broken and tokens[0] == 3 and len(tokens) == 9:
            logits[4] = bad
        return logits

    def alone(prompt: list[int]) -> list[int]:
        return collect(engine_of(FakeTarget(), 2), [prompt], 20, params)[0][0]

    engine = engine_of(FakeTarget(2, law=law), 2, dataclasses.replace(NO_END, n_seq=2))
    broken = engine.submit([3, 1, 4], params, 20)
    whole = engine.submit([2, 7], params, 20)
    chunks: dict[int, list[Chunk]] = {broken: [], whole: []}
    while not engine.is_idle:
        for chunk in engine.step():
            chunks[chunk.seq].append(chunk)
    last = chunks[broken][-1]
    assert last.finish_reason == "failed"
    assert isinstance(last.error, BadLogits)
    assert last.error.position == 9
    assert f"computed {bad} as a logit of the token at position 9" in str(last.error)
    written = [t for c in chunks[broken] for t in c.tokens]
    assert written == alone([3, 1, 4])[:6]  # all that was sound, however far was drafted
    assert [t for c in chunks[whole] for t in c.tokens] == alone([2, 7])
    is_broken = False
    [answer], [end] = collect(engine, [[3, 1, 4]], 20, GREEDY)
    assert answer == greedy([3, 1, 4], 20)  # nothing of the bad cache is used again
    assert end.stats is not None
    assert end.stats.cached_tokens == 0


def test_an_iterator_raises_what_its_request_failed_with() -> None:
    engine = engine_of(FakeTarget(law=lambda _: np.full(N_VOCAB, -np.inf, np.float32)), 0)
    with pytest.raises(BadLogits, match="position 3"):
        collect(engine, [[3, 1, 4]])
    assert engine.is_idle


def test_a_drafter_whose_logits_are_no_numbers_drafts_nothing() -> None:
    run = DraftBuilder(
        Ask(
            0,
            [1, 2],
            DraftLimit(4),
            SamplingChain(SamplingParams(temperature=1.5, top_k=0), [1, 2]),
        )
    )
    run.take(np.full(N_VOCAB, np.nan, np.float32))
    assert run.draft("mtp").tokens == []
    assert not run.wants_more


@pytest.mark.parametrize("depth", range(5))
def test_what_comes_before_bad_logits_does_not_depend_on_the_depth(depth: int) -> None:
    def law(tokens: Sequence[int]) -> np.ndarray:
        return np.full(N_VOCAB, np.nan, np.float32) if len(tokens) == 20 else logits_after(tokens)

    engine = engine_of(FakeTarget(law=law), depth)
    tokens: list[int] = []

    def read() -> None:
        for chunk in engine.generate([[3, 1, 4]], GREEDY, 40):
            tokens.extend(chunk.tokens)

    with pytest.raises(BadLogits, match="position 20"):
        read()
    assert tokens == greedy([3, 1, 4], 17)


def test_a_stream_that_another_one_has_ended_still_gives_its_last_chunk() -> None:
    engine = engine_of(FakeTarget(2), 1, dataclasses.replace(NO_END, n_seq=2))
    first = engine.open([[3, 1, 4]], GREEDY, 9)
    next(first)
    collect(engine, [[2, 7]], 40)
    [last] = first.cancel()
    assert last.finish_reason == "length"
    assert last.stats is not None
    assert list(first) == []


def test_a_stream_that_is_dropped_ends_before_the_next_round() -> None:
    engine = engine_of(FakeTarget(), 1)
    stream = engine.open([[3, 1, 4]], GREEDY, 30)
    next(stream)
    thread = threading.Thread(target=lambda held: held.clear(), args=([stream],))
    thread.start()
    thread.join()
    del stream
    assert not engine.is_idle  # another thread touches no slot
    [answer], _ = collect(engine, [[2, 7]], 9)
    assert answer == greedy([2, 7], 9)
    assert engine.is_idle


def test_prompts_are_taken_all_or_none() -> None:
    engine = engine_of(FakeTarget(), 1)
    with pytest.raises(RequestError, match="the prompt is empty"):
        engine.open([[1, 2], []], GREEDY, 9)
    assert engine.is_idle


def test_a_closed_engine_touches_its_decoders_no_more() -> None:
    target = FakeTarget()
    engine = engine_of(target, 1)
    stream = engine.open([[3, 1, 4]], GREEDY, 30)
    next(stream)
    n_batches, cache = len(target.batches), [list(c) for c in target.cache]
    engine.close()
    with pytest.raises(RequestError, match="the model is closed"):
        next(stream)
    with pytest.raises(RequestError, match="the model is closed"):
        engine.submit([1], GREEDY, 1)
    stream.close()
    assert (len(target.batches), target.cache) == (n_batches, cache)
