"""The samplers against their definitions, wherever the likely tokens lie and whatever changes."""

from __future__ import annotations

import random

import numpy as np
import pytest

from gguf_mtp.params import SAMPLERS, SamplingParams
from gguf_mtp.sampling import filters
from gguf_mtp.sampling.chain import SamplingChain
from gguf_mtp.sampling.filters import Candidates, Filters, probability
from gguf_mtp.sampling.rows import Row
from gguf_mtp.types import Distribution
from tests.support.sampling_reference import by_definition

PARAMS = [
    SamplingParams(0.0),
    SamplingParams(1.0, 0, 1.0, 0.0),
    SamplingParams(0.7, 40, 1.0, 0.0),
    SamplingParams(0.7, 0, 0.9, 0.0),
    SamplingParams(1.3, 0, 0.999, 0.0),
    SamplingParams(1.3, 0, 1.0, 0.05),
    SamplingParams(1.3, 0, 1.0, 1e-5),
    SamplingParams(0.6, 40, 0.95, 0.05),
    SamplingParams(2.0, 1, 0.5, 1.0),
    SamplingParams(0.8, 0, 1.0, 0.0, typical_p=0.3),
    SamplingParams(0.8, 40, 0.95, 0.05, typical_p=0.9),
    SamplingParams(0.0, 40, 1.0, 0.0, typical_p=0.2),
    SamplingParams(0.5, 20, 0.9, 0.1, samplers=("temperature", "min_p", "top_p", "top_k")),
    SamplingParams(0.5, 20, 0.9, 0.1, samplers=("temperature", "top_k", "min_p")),
    SamplingParams(0.5, 20, 0.9, 0.1, samplers=("top_p",)),
    SamplingParams(0.0, 20, 0.9, 0.1, samplers=()),
]
PENALTIES = [
    {},
    {"repeat_penalty": 1.3},
    {"frequency_penalty": 0.7, "presence_penalty": 1.1, "repeat_last_n": 7},
    {"repeat_penalty": 0.7, "frequency_penalty": -2.0, "repeat_last_n": -1},
    {"logit_bias": ((3, 6.0), (4, float("-inf")), (0, -3.0), (3, 1.0))},
    {"logit_bias": ((1, 25.0),), "presence_penalty": 30.0},
]


def agree(law: Distribution, expected: dict[int, float]) -> None:
    assert set(law.ids.tolist()) == set(expected)
    for token, prob in zip(law.ids.tolist(), law.probs, strict=True):
        assert prob == pytest.approx(expected[token], rel=2e-5, abs=1e-12)


def row_of(n_vocab: int, seed: int) -> np.ndarray:
    return (3 * np.random.default_rng(seed).standard_normal(n_vocab)).astype(np.float32)


@pytest.mark.parametrize("n_vocab", [5, 300, 20_001])
@pytest.mark.parametrize("params", PARAMS)
def test_samplers_are_what_llama_cpp_defines(n_vocab: int, params: SamplingParams) -> None:
    for seed in range(3):
        logits = row_of(n_vocab, seed)
        agree(SamplingChain(params).target_probs(logits), by_definition(logits, params))


@pytest.mark.parametrize("changes", PENALTIES)
@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("is_masked", [False, True])
def test_changed_rows_are_what_llama_cpp_defines(
    params: SamplingParams, changes: dict, is_masked: bool
) -> None:
    asked = {f: getattr(params, f) for f in params.__dataclass_fields__} | changes
    params = SamplingParams(**asked)
    for seed, n_vocab in ((0, 40), (1, 400), (2, 5000)):
        logits = row_of(n_vocab, seed)
        rng = np.random.default_rng(seed)
        prompt, after = rng.integers(0, 12, 30).tolist(), rng.integers(0, 12, 3).tolist()
        prompt += logits.argsort()[-4:].tolist()  # the likeliest ones came too
        mask = rng.random(n_vocab) < 0.3 if is_masked else None
        constraint = Allows(mask) if is_masked else None
        law = SamplingChain(params, prompt, constraint).target_probs(logits, after)
        agree(law, by_definition(logits, params, [*prompt, *after], mask))


class Allows:
    """A constraint that allows the same tokens everywhere."""

    def __init__(self, mask: np.ndarray | None) -> None:
        self.mask = mask

    def allowed(self, _after):  # type: ignore[no-untyped-def]
        return self.mask

    def commit(self, tokens) -> None:  # type: ignore[no-untyped-def]
        pass


def test_any_order_is_what_llama_cpp_defines() -> None:
    rng = random.Random(1)
    for seed in range(60):
        order = rng.sample(SAMPLERS, rng.randint(1, len(SAMPLERS)))
        params = SamplingParams(
            rng.choice([0.0, 0.5, 1.0, 1.7]),
            rng.choice([0, 3, 40]),
            rng.choice([0.6, 1.0]),
            rng.choice([0.0, 0.05]),
            typical_p=rng.choice([0.5, 1.0]),
            repeat_penalty=1.4,
            frequency_penalty=0.3,
            samplers=tuple(order),
        )
        logits, history = row_of(700, seed), rng.choices(range(700), k=90)
        agree(
            SamplingChain(params, history).target_probs(logits),
            by_definition(logits, params, history),
        )


@pytest.mark.parametrize("n_vocab", [100, 129_280])
@pytest.mark.parametrize("spread", [0.5, 3.0, 20.0])
@pytest.mark.parametrize("k", [1, 40, 1000])
def test_top_k_is_found_wherever_it_lies(n_vocab: int, spread: float, k: int) -> None:
    """Flat laws have more than k tokens near the top, sharp ones fewer."""
    rng = np.random.default_rng(n_vocab + k)
    logits = (spread * rng.standard_normal(n_vocab)).astype(np.float32)
    expected = np.lexsort((np.arange(n_vocab), -logits))[:k]
    law = Filters(SamplingParams(1.0, k, 1.0, 0.0)).distribution(Row(logits))
    assert law.ids.tolist() == expected.tolist()


def test_greedy_is_the_first_of_equal_maxima() -> None:
    law = SamplingChain(SamplingParams(temperature=0)).target_probs(
        np.array([1, 5, 5, 2], np.float32)
    )
    assert (law.ids.tolist(), law.probs.tolist()) == ([1], [1.0])


def test_a_few_changes_touch_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Penalties, a ban and a mask do not look at the whole vocabulary, and write nothing."""
    monkeypatch.setattr(Row, "everything", lambda _: pytest.fail("the whole row was looked at"))
    params = SamplingParams(repeat_penalty=1.1, logit_bias=((7, float("-inf")),))
    logits = np.random.default_rng(0).standard_normal(129_280).astype(np.float32)
    before, mask = logits.copy(), np.ones(129_280, bool)
    for p in (params, SamplingParams(temperature=0, repeat_penalty=1.1)):
        law = SamplingChain(p, range(64), Allows(mask)).target_probs(logits)
        assert len(law.ids) == 1 if p.temperature == 0 else len(law.ids) > 30
    assert (logits == before).all()


def test_a_ban_gives_way_where_nothing_else_is_allowed() -> None:
    mask = np.zeros(9, bool)
    mask[4] = True
    for temperature in (0, 0.8):
        params = SamplingParams(temperature, logit_bias=((4, float("-inf")),))
        assert SamplingChain(params, (), Allows(mask)).target_probs(row_of(9, 0)).ids.tolist() == [
            4
        ]
        chain = SamplingChain(SamplingParams(temperature), (), Allows(np.zeros(9, bool)))
        assert chain.target_probs(row_of(9, 0)).ids[0] == row_of(9, 0).argmax()


def test_typical_sampling_may_drop_the_likeliest() -> None:
    """0.4, and 60 times 0.01: the expected surprise is nearer to the rare ones."""
    logits = np.log(np.array([0.4] + [0.01] * 60)).astype(np.float32)
    law = SamplingChain(SamplingParams(1.0, 0, 1.0, 0.0, typical_p=0.405)).target_probs(logits)
    assert 0 not in law.ids
    assert len(law.ids) == 41  # the first sum above 0.405


def test_mutant_that_measures_top_p_against_what_is_near_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(filters, "_likeliest_part", lambda row, _: filters._falling(*row.near()))
    logits = np.concatenate(([9.0], np.zeros(50_000))).astype(np.float32)
    params = SamplingParams(1.0, 0, 0.9, 0.0)
    with pytest.raises(AssertionError):
        agree(SamplingChain(params).target_probs(logits), by_definition(logits, params))


def test_probability_of_a_filtered_token_is_zero() -> None:
    law = Distribution(np.array([4, 2]), np.array([0.75, 0.25]))
    assert [probability(law, t) for t in (4, 2, 0)] == [0.75, 0.25, 0.0]


def test_candidates_carry_their_logits() -> None:
    c = filters._falling(np.array([2, 5, 9]), np.array([0.5, 2, 2], np.float32))
    assert isinstance(c, Candidates)
    assert c.ids.tolist() == [5, 9, 2]
    assert c.logits.tolist() == [2, 2, 0.5]
