"""Sampling: the filters against their definitions, the draws against their law."""

from __future__ import annotations

import numpy as np
import pytest

from gguf_mtp.errors import RequestError
from gguf_mtp.params import SamplingParams
from gguf_mtp.sampling import Chain, filtered, probability
from gguf_mtp.types import Distribution


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x.astype(np.float64) - x.max())
    return e / e.sum()


def by_definition(logits: np.ndarray, p: SamplingParams) -> dict[int, float]:
    """llama.cpp's default chain, one token at a time, sorted in full."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if p.top_k:
        order = order[: p.top_k]
    if p.top_p < 1:
        probs, total, kept = softmax(logits[order]), 0.0, []
        for i, prob in zip(order, probs, strict=True):
            kept.append(i)
            total += prob
            if total >= p.top_p:
                break
        order = kept
    if p.min_p:
        probs = softmax(logits[order])
        order = [i for i, prob in zip(order, probs, strict=True) if prob >= p.min_p * probs[0]]
    probs = softmax(logits[order] / np.float64(p.temperature))
    return dict(zip(order, probs, strict=True))


@pytest.mark.parametrize("n_vocab", [5, 300, 20_001])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(1.0, 0, 1.0, 0.0),
        SamplingParams(0.7, 40, 1.0, 0.0),
        SamplingParams(0.7, 0, 0.9, 0.0),
        SamplingParams(1.3, 0, 0.999, 0.0),
        SamplingParams(1.3, 0, 1.0, 0.05),
        SamplingParams(0.6, 40, 0.95, 0.05),
        SamplingParams(2.0, 1, 0.5, 1.0),
    ],
)
def test_filters_are_what_llama_cpp_defines(n_vocab: int, params: SamplingParams) -> None:
    for seed in range(3):
        logits = (3 * np.random.default_rng(seed).standard_normal(n_vocab)).astype(np.float32)
        law = filtered(logits, params)
        expected = by_definition(logits, params)
        assert set(law.ids.tolist()) == set(expected)
        for token, prob in zip(law.ids, law.probs, strict=True):
            assert prob == pytest.approx(expected[int(token)], rel=1e-5)


@pytest.mark.parametrize("n_vocab", [100, 129_280])
@pytest.mark.parametrize("spread", [0.5, 3.0, 20.0])
@pytest.mark.parametrize("k", [1, 40, 1000])
def test_top_k_is_found_wherever_it_lies(n_vocab: int, spread: float, k: int) -> None:
    """Flat laws have more than k tokens near the top, sharp ones fewer."""
    rng = np.random.default_rng(n_vocab + k)
    logits = (spread * rng.standard_normal(n_vocab)).astype(np.float32)
    expected = np.lexsort((np.arange(n_vocab), -logits))[:k]
    assert filtered(logits, SamplingParams(1.0, k, 1.0, 0.0)).ids.tolist() == expected.tolist()


def test_greedy_is_the_first_of_equal_maxima() -> None:
    law = Chain(SamplingParams(temperature=0)).law(np.array([1, 5, 5, 2], np.float32))
    assert (law.ids.tolist(), law.probs.tolist()) == ([1], [1.0])


def test_draws_follow_the_law() -> None:
    law = Distribution(np.array([7, 3, 9]), np.array([0.5, 0.3, 0.2]))
    chain = Chain(SamplingParams(seed=1))
    n = 20_000
    counts = np.bincount([chain.draw(law) for _ in range(n)], minlength=10)[law.ids]
    chi2 = ((counts - n * law.probs) ** 2 / (n * law.probs)).sum()
    assert chi2 < 13.8  # 2 degrees of freedom, p = 0.001


def test_the_same_seed_draws_the_same() -> None:
    law = Distribution(np.arange(50), np.full(50, 0.02))
    draws = [[Chain(SamplingParams(seed=s)).draw(law) for s in (5,) * 3] for _ in range(2)]
    assert draws[0] == draws[1]
    one, two = Chain(SamplingParams(seed=5)), Chain(SamplingParams(seed=6))
    assert [one.draw(law) for _ in range(20)] != [two.draw(law) for _ in range(20)]


def test_a_look_is_the_law_and_the_largest_softmax_near_the_top() -> None:
    for spread in (0.5, 3.0):
        logits = (spread * np.random.default_rng(1).standard_normal(5000)).astype(np.float32)
        for params in (SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=0)):
            chain = Chain(params)
            law, sure = chain.look(logits)
            expected = chain.law(logits)
            assert law.ids.tolist() == expected.ids.tolist()
            assert law.probs.tolist() == expected.probs.tolist()
            near = logits[logits >= logits.max() - 8]
            assert sure == pytest.approx(softmax(near).max(), rel=1e-5)


def test_probability_of_a_filtered_token_is_zero() -> None:
    law = Distribution(np.array([4, 2]), np.array([0.75, 0.25]))
    assert [probability(law, t) for t in (4, 2, 0)] == [0.75, 0.25, 0.0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.01),
        ("min_p", 2.0),
        ("seed", -1),
    ],
)
def test_values_out_of_range_are_named(field: str, value: float) -> None:
    with pytest.raises(RequestError, match=field) as error:
        SamplingParams(**{field: value})
    assert str(value) in str(error.value)
