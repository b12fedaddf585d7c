"""The contract every drafter keeps, under random interleavings, and the MTP drafter's own counts.

`FakeMtp` asserts that each row pairs a token with the hidden row before it, in order and once, and
it keeps no hidden row that it has decoded.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from gguf_mtp.drafters import registry
from gguf_mtp.drafters.draft_model import ModelDrafter
from gguf_mtp.drafters.dspark import DsparkDrafter
from gguf_mtp.drafters.mtp import FLUSH, MtpDrafter
from gguf_mtp.drafters.ngram import NgramDrafter
from gguf_mtp.errors import DecodeError
from gguf_mtp.gguf.arch.dflash import BlockShape
from gguf_mtp.params import SamplingParams
from gguf_mtp.sampling.chain import SamplingChain
from gguf_mtp.types import Ask, Draft, Drafter, DraftLimit, Rows
from tests.support.fakes import N_VOCAB, FakeBlocks, FakeMtp, FakeTarget, hidden_row, logits_after

N_SEQ = 3
SHAPE = BlockShape(5, FakeBlocks.MASK, (1, 2))
GREEDY = SamplingChain(SamplingParams(temperature=0))


def mtp_drafter() -> Drafter:
    return MtpDrafter(FakeMtp(N_SEQ), N_SEQ, 512)


def ngram_drafter() -> Drafter:
    return NgramDrafter(N_SEQ)


def model_drafter() -> Drafter:
    return ModelDrafter(FakeTarget(N_SEQ, n_batch=64), 64)


def dspark_drafter() -> Drafter:
    return DsparkDrafter(FakeBlocks(N_SEQ), N_SEQ, 512, SHAPE)


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "mtp": mtp_drafter,
    "ngram": ngram_drafter,
    "dspark": dspark_drafter,
    "model": model_drafter,
}


def rows_of(tokens: list[int], seq: int, first: int) -> Rows:
    """What the target has decoded of `tokens` from `first` on: all but the last one."""
    stop = len(tokens) - 1
    hidden = np.array([hidden_row(tokens, p) for p in range(first, stop)])
    return Rows(seq, first, tokens[first:stop], 0, hidden.copy())


class Driver:
    """Feeds a drafter as the engine does. `tokens[seq]` are certain, all but the last one
    decoded."""

    def __init__(self, make: Callable[[], Drafter], seed: int) -> None:
        self.make, self.drafter = make, make()
        self.random = random.Random(seed)
        self.tokens = [[self.random.randrange(N_VOCAB)] for _ in range(N_SEQ)]
        self.observed = [0] * N_SEQ
        self.n_drafted = 0

    def extend(self) -> None:
        rows = []
        for seq in self.random.sample(range(N_SEQ), self.random.randint(1, N_SEQ)):
            n = self.random.choice([1, 1, 2, 3, 40, FLUSH + 7])
            tokens = self.tokens[seq]
            if n < 40 and self.random.random() < 0.5:  # what stood here before
                at = self.random.randrange(len(tokens))
                tokens += tokens[at : at + n]
            else:
                tokens += [self.random.randrange(N_VOCAB) for _ in range(n)]
            rows.append(rows_of(tokens, seq, self.observed[seq]))
            self.observed[seq] = len(tokens) - 1
        self.drafter.observe(rows)
        for r in rows:  # what the target computed is gone after its next decode
            assert r.hidden is not None
            r.hidden[:] = np.nan

    def propose(self) -> None:
        seqs = self.random.sample(range(N_SEQ), self.random.randint(1, N_SEQ))
        asks = [
            Ask(s, list(self.tokens[s]), DraftLimit(self.random.choice([0, 1, 2, 5])), GREEDY)
            for s in seqs
        ]
        drafts = self.drafter.propose(asks)
        assert len(drafts) == len(asks)
        for ask, draft in zip(asks, drafts, strict=True):
            assert len(draft.tokens) <= ask.limit.n
            assert len(draft.tokens) == len(draft.probs) == len(draft.confidence)
            assert all(0 <= sure <= 1 for sure in draft.confidence)
            assert draft.source == self.drafter.name or not draft.tokens
            assert draft == self.drafter.propose([ask])[0], "propose had a lasting effect"
            if draft.tokens or self.drafter.name != "mtp":  # a hidden row may be gone, see types
                assert draft == self.fresh(ask), "the past shows in a draft"
            self.n_drafted += len(draft.tokens)

    def fresh(self, ask: Ask) -> Draft:
        """The draft of a drafter that was told the certain tokens at once, and nothing else."""
        drafter = self.make()
        if len(ask.tokens) > 1:
            drafter.observe([rows_of(list(ask.tokens), ask.seq, 0)])
        return drafter.propose([ask])[0]

    def rewind(self) -> None:
        seq = self.random.randrange(N_SEQ)
        n = self.random.randint(0, len(self.tokens[seq]))
        self.drafter.rewind(seq, n)
        self.observed[seq] = min(self.observed[seq], max(n - 1, 0))
        del self.tokens[seq][max(n, 1) :]
        if n == 0:
            self.tokens[seq] = [self.random.randrange(N_VOCAB)]

    def copy(self) -> None:
        src, dst = self.random.sample(range(N_SEQ), 2)
        n = self.random.randint(1, self.observed[src] + 1)
        self.drafter.copy(src, dst, n)
        self.tokens[dst], self.observed[dst] = self.tokens[src][:n], n - 1

    def save_and_load(self) -> None:
        src, dst = (self.random.randrange(N_SEQ) for _ in range(2))
        n = self.random.randint(1, self.observed[src] + 1)
        self.drafter.rewind(src, n)
        del self.tokens[src][n:]
        self.observed[src] = n - 1
        self.drafter.load(dst, self.drafter.save(src))
        self.tokens[dst], self.observed[dst] = self.tokens[src][:], n - 1


def test_every_drafter_is_held_to_the_contract() -> None:
    assert set(DRAFTERS) == set(registry.DRAFTERS)
    assert [make().name for make in DRAFTERS.values()] == list(DRAFTERS)


@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)
@pytest.mark.parametrize("seed", range(6))
def test_contract(make: Callable[[], Drafter], seed: int) -> None:
    driver = Driver(make, seed)
    actions = [
        driver.extend,
        driver.propose,
        driver.propose,
        driver.rewind,
        driver.copy,
        driver.save_and_load,
    ]
    for _ in range(120):
        driver.random.choice(actions)()
    assert driver.n_drafted > 10


@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)
def test_bounds_on_confidence_end_a_draft_before_that_token(make: Callable[[], Drafter]) -> None:
    drafter, tokens = make(), [1, 2, 3, 4, 5] * 4
    drafter.observe([rows_of(tokens, 0, 0)])
    [free] = drafter.propose([Ask(0, tokens, DraftLimit(5), GREEDY)])
    assert len(free.tokens) == 5
    for k in range(5):
        bounds = [0.0] * k + [float(np.nextafter(free.confidence[k], 2))]
        [bounded] = drafter.propose([Ask(0, tokens, DraftLimit(5, bounds), GREEDY)])
        assert bounded.tokens == free.tokens[:k]


def fed(n_tokens: int, mtp: FakeMtp, n_batch: int = 512) -> tuple[MtpDrafter, list[int]]:
    """A drafter that has observed all but the last of `n_tokens`, one row at a time."""
    drafter = MtpDrafter(mtp, N_SEQ, n_batch)
    tokens = [(5 * i) % N_VOCAB for i in range(n_tokens)]
    for pos in range(n_tokens - 1):
        hidden = hidden_row(tokens, pos)[None]
        drafter.observe([Rows(0, pos, tokens[pos : pos + 1], 0, hidden)])
    return drafter, tokens


@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_draft_of_n_costs_n_decodes_catch_up_included(n: int) -> None:
    mtp = FakeMtp()
    drafter, tokens = fed(9, mtp)
    [draft] = drafter.propose([Ask(0, tokens, DraftLimit(n), GREEDY)])
    assert len(draft.tokens) == n
    assert len(mtp.batches) == n
    assert [len(batch[0].tokens) for batch in mtp.batches] == [8] + [1] * (n - 1)
    assert mtp.cache[0] == tokens


def test_without_drafts_one_decode_per_256_rows() -> None:
    mtp = FakeMtp()
    fed(3 * FLUSH + 2, mtp)
    assert [len(batch[0].tokens) for batch in mtp.batches] == [FLUSH] * 3


def test_pausing_does_not_change_what_is_drafted() -> None:
    resumed, tokens = fed(700, FakeMtp())
    steady = MtpDrafter(FakeMtp(), N_SEQ, 512)
    for pos in range(699):
        hidden = hidden_row(tokens, pos)[None]
        steady.observe([Rows(0, pos, tokens[pos : pos + 1], 0, hidden)])
        steady.propose([Ask(0, tokens[: pos + 2], DraftLimit(2), GREEDY)])
    ask = Ask(0, tokens, DraftLimit(5), GREEDY)
    assert resumed.propose([ask]) == steady.propose([ask])


def test_buffers_larger_than_a_batch_are_decoded_in_several() -> None:
    mtp = FakeMtp(N_SEQ, n_batch=FLUSH + 8)
    drafter = MtpDrafter(mtp, N_SEQ, FLUSH + 8)
    tokens = [[(s + 5 * i) % N_VOCAB for i in range(200)] for s in range(N_SEQ)]
    for s in range(N_SEQ):
        hidden = np.array([hidden_row(tokens[s], p) for p in range(199)])
        drafter.observe([Rows(s, 0, tokens[s][:199], 0, hidden)])
    drafts = drafter.propose([Ask(s, tokens[s], DraftLimit(1), GREEDY) for s in range(N_SEQ)])
    for s, draft in enumerate(drafts):
        skilled = sum(tokens[s]) % 3 > 0
        law = logits_after(tokens[s])
        assert draft.tokens == [int((law if skilled else np.roll(law, 1)).argmax())]


def test_sampled_drafts_carry_the_law_they_were_drawn_from() -> None:
    drafter, tokens = fed(9, FakeMtp(skill=lambda _: True))
    chain = SamplingChain(SamplingParams(1.2, 0, 1.0, 0.0, seed=1))
    [draft] = drafter.propose([Ask(0, tokens, DraftLimit(3), chain)])
    prefix = list(tokens)
    for token, law in zip(draft.tokens, draft.probs, strict=True):
        expected = chain.target_probs(logits_after(prefix))
        assert law is not None
        assert (law.ids == expected.ids).all()
        assert law.probs == pytest.approx(expected.probs)
        assert token in law.ids
        prefix.append(token)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_failed_decode_leaves_certain_rows_only(n: int) -> None:
    mtp = FakeMtp(fail_at=frozenset({n}))
    drafter, tokens = fed(9, mtp)
    with pytest.raises(DecodeError):
        drafter.propose([Ask(0, tokens, DraftLimit(4), GREEDY)])
    assert mtp.cache[0] == ([] if n == 1 else tokens)
    [draft] = drafter.propose([Ask(0, tokens, DraftLimit(4), GREEDY)])
    assert len(draft.tokens) == 4


# -- DSpark's own --------------------------------------------------------------------------------


def blocks(n_tokens: int, context: FakeBlocks, n_batch: int = 512) -> tuple[Drafter, list[int]]:
    """A drafter that has observed all but the last of `n_tokens`."""
    drafter = DsparkDrafter(context, N_SEQ, n_batch, SHAPE)
    tokens = [(5 * i) % N_VOCAB for i in range(n_tokens)]
    drafter.observe([rows_of(tokens, 0, 0)])
    return drafter, tokens


@pytest.mark.parametrize("n", [1, 3, 5, 9])
def test_a_block_costs_two_decodes_whatever_its_length(n: int) -> None:
    """And no more than a block is drafted."""
    context = FakeBlocks()
    drafter, tokens = blocks(9, context)
    [draft] = drafter.propose([Ask(0, tokens, DraftLimit(n), GREEDY)])
    assert len(draft.tokens) == min(n, 5)
    assert [len(batch[0].tokens) for batch in context.batches] == [8, 5]
    assert context.cache[0] == tokens[:-1]


def test_a_draft_ends_behind_a_token_that_the_block_did_not_go_on_from() -> None:
    """What follows was guessed for the likeliest token; each has the law it was drawn from."""
    context = FakeBlocks(skill=lambda _: True)
    drafter, tokens = blocks(9, context)
    lengths = set()
    for seed in range(60):
        chain = SamplingChain(SamplingParams(1.5, 0, 1.0, 0.0, seed=seed))
        [draft] = drafter.propose([Ask(0, tokens, DraftLimit(5), chain)])
        text = list(tokens)
        for k, (token, law) in enumerate(zip(draft.tokens, draft.probs, strict=True)):
            expected = chain.target_probs(logits_after(text))
            assert law is not None
            assert law.probs == pytest.approx(expected.probs)
            likeliest = int(logits_after(text).argmax())
            assert token == likeliest or k == len(draft.tokens) - 1
            text.append(likeliest)
        lengths.add(len(draft.tokens))
    assert len(lengths) > 2


def test_more_rows_than_a_batch_holds_are_decoded_in_several() -> None:
    context = FakeBlocks(N_SEQ, n_batch=64)
    drafter = DsparkDrafter(context, N_SEQ, 64, BlockShape(30, FakeBlocks.MASK, (1,)))
    texts = [[(s + 5 * i) % N_VOCAB for i in range(41)] for s in range(N_SEQ)]
    drafter.observe([rows_of(text, s, 0) for s, text in enumerate(texts)])
    asks = [Ask(s, text, DraftLimit(4), GREEDY) for s, text in enumerate(texts)]
    drafts = drafter.propose(asks)
    assert [len(batch) for batch in context.batches] == [1, 1, 1, 2, 1]
    assert drafts == [blocks_alone(ask) for ask in asks]


def blocks_alone(ask: Ask) -> Draft:
    drafter = DsparkDrafter(FakeBlocks(N_SEQ), N_SEQ, 512, BlockShape(30, FakeBlocks.MASK, (1,)))
    drafter.observe([rows_of(list(ask.tokens), ask.seq, 0)])
    return drafter.propose([ask])[0]


@pytest.mark.parametrize("n", [1, 2])
def test_a_failed_block_leaves_certain_rows_only(n: int) -> None:
    context = FakeBlocks(fail_at=frozenset({n}))
    drafter, tokens = blocks(9, context)
    with pytest.raises(DecodeError):
        drafter.propose([Ask(0, tokens, DraftLimit(4), GREEDY)])
    assert context.cache[0] == ([] if n == 1 else tokens[:-1])
    [draft] = drafter.propose([Ask(0, tokens, DraftLimit(4), GREEDY)])
    assert len(draft.tokens) == 4
