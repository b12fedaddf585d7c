"""The draft model's rows, counted on a decoder without a model; then a shallow copy of the demo."""

from __future__ import annotations

import pytest

from gguf_mtp.drafters.draft_model import ModelDrafter
from gguf_mtp.errors import DecodeError
from gguf_mtp.params import SamplingParams
from gguf_mtp.sampling.chain import SamplingChain
from gguf_mtp.types import Ask, DraftLimit
from tests.support.fakes import N_VOCAB, FakeTarget, logits_after

GREEDY = SamplingChain(SamplingParams(temperature=0))


def ask(tokens: list[int], n: int, seq: int = 0) -> Ask:
    return Ask(seq, tokens, DraftLimit(n), GREEDY)


def shapes(model: FakeTarget) -> list[list[tuple[int, int]]]:
    """Rows and outputs of each sequence in each decode."""
    return [[(len(r.tokens), r.n_outputs) for r in batch] for batch in model.batches]


@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_draft_of_n_costs_n_decodes_catch_up_included(n: int) -> None:
    model = FakeTarget(1)
    drafter = ModelDrafter(model, 512)
    tokens = [3, 1, 4, 1, 5, 9, 2]
    [draft] = drafter.propose([ask(tokens, n)])
    assert shapes(model) == [[(7, 1)]] + [[(1, 1)]] * (n - 1)
    expected = list(tokens)
    for token in draft.tokens:
        assert token == int(logits_after(expected).argmax())
        expected.append(token)
    assert model.cache[0] == tokens, "only certain rows stay"


def test_only_what_is_new_is_read_and_nothing_without_a_draft() -> None:
    model = FakeTarget(1)
    drafter = ModelDrafter(model, 512)
    tokens = [3, 1, 4]
    drafter.propose([ask(tokens, 2)])
    model.batches.clear()
    assert not drafter.propose([ask(tokens, 0)])[0].tokens
    assert model.batches == []
    drafter.propose([ask([*tokens, 5, 9], 1)])
    assert shapes(model) == [[(2, 1)]]


def test_sequences_share_every_decode() -> None:
    model = FakeTarget(3)
    drafter = ModelDrafter(model, 512)
    drafter.propose([ask([1, 2], 3, 0), ask([3], 1, 2), ask([4, 5, 6], 2, 1)])
    assert shapes(model) == [[(2, 1), (1, 1), (3, 1)], [(1, 1), (1, 1)], [(1, 1)]]


def test_texts_longer_than_a_batch_are_read_in_several() -> None:
    model = FakeTarget(2, n_batch=16)
    drafter = ModelDrafter(model, 16)
    tokens = [[(s + 5 * i) % N_VOCAB for i in range(50)] for s in range(2)]
    drafts = drafter.propose([ask(tokens[s], 2, s) for s in range(2)])
    for s, draft in enumerate(drafts):
        assert draft.tokens[0] == int(logits_after(tokens[s]).argmax())
        assert model.cache[s] == tokens[s]
    assert max(sum(n for n, _ in batch) for batch in shapes(model)) <= 16


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_failed_decode_leaves_certain_rows_only(n: int) -> None:
    model = FakeTarget(1, fail_at=frozenset({n}))
    drafter = ModelDrafter(model, 512)
    tokens = [3, 1, 4, 1, 5]
    with pytest.raises(DecodeError):
        drafter.propose([ask(tokens, 4)])
    assert model.cache[0] == ([] if n == 1 else tokens)
    assert len(drafter.propose([ask(tokens, 4)])[0].tokens) == 4


def test_drafts_carry_the_law_they_were_drawn_from_after_what_was_drafted() -> None:
    chain = SamplingChain(SamplingParams(1.2, 0, 1.0, 0.0, seed=1))
    drafter = ModelDrafter(FakeTarget(1), 512)
    tokens = [3, 1, 4]
    [draft] = drafter.propose([Ask(0, tokens, DraftLimit(3), chain)])
    prefix = list(tokens)
    for token, law in zip(draft.tokens, draft.probs, strict=True):
        expected = chain.draft_probs(logits_after(prefix), prefix[3:])[0]
        assert law is not None
        assert (law.ids == expected.ids).all()
        assert law.probs == pytest.approx(expected.probs)
        assert token in law.ids
        prefix.append(token)
