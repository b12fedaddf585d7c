"""The chain: draws against their law, the noise of a seed, confidence, values out of range."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from gguf_mtp.errors import RequestError
from gguf_mtp.params import (
    NEVER_ON,
    SAMPLERS,
    RequestOptions,
    SamplingParams,
    bias_of,
    sampler_order,
)
from gguf_mtp.sampling.chain import SamplingChain
from gguf_mtp.sampling.noise import uniforms
from gguf_mtp.types import Distribution
from tests.support.sampling_reference import softmax

LAW = Distribution(np.array([7, 3, 9]), np.array([0.5, 0.3, 0.2]))


def unseeded(seed: int = 1) -> SamplingChain:
    return SamplingChain(SamplingParams(), rng=np.random.default_rng(seed))


def chi_square(draws: list[int]) -> float:
    """Against `LAW`; 2 degrees of freedom."""
    expected = len(draws) * LAW.probs
    counts = np.bincount(draws, minlength=10)[LAW.ids]
    return float(((counts - expected) ** 2 / expected).sum())


def test_draws_follow_the_law() -> None:
    chain = unseeded()
    assert chi_square([chain.draw(LAW) for _ in range(20_000)]) < 13.8  # p = 0.001


@pytest.mark.parametrize("over", ["positions", "seeds"])
def test_seeded_draws_follow_the_law(over: str) -> None:
    n = 20_000
    if over == "positions":
        chain = SamplingChain(SamplingParams(seed=3))
        draws = [chain.draw(LAW, range(k)) for k in range(n)]
    else:
        draws = [SamplingChain(SamplingParams(seed=s)).draw(LAW) for s in range(n)]
    assert chi_square(draws) < 13.8


def test_a_seeded_draw_depends_on_its_place_alone() -> None:
    flat = Distribution(np.arange(50), np.full(50, 0.02))
    chain = SamplingChain(SamplingParams(seed=5), [1, 2, 3])
    ahead = [chain.draw(flat, range(k)) for k in range(20)]
    for token in ahead:
        assert chain.draw(flat) == token
        chain.commit([token])
    assert len(set(ahead)) > 10
    other = SamplingChain(SamplingParams(seed=6), [1, 2, 3])
    assert [other.draw(flat, range(k)) for k in range(20)] != ahead


def test_near_laws_draw_the_same_token() -> None:
    """What shares its noise with the target is right almost as often as the laws overlap."""
    rng, n_same = np.random.default_rng(0), 0
    for place in range(2000):
        p = softmax(rng.standard_normal(40))
        q = p * np.exp(0.2 * rng.standard_normal(40))
        ids, chain = np.arange(40), SamplingChain(SamplingParams(seed=1), range(place))
        n_same += chain.draw(Distribution(ids, p)) == chain.draw(Distribution(ids, q / q.sum()))
    assert n_same / 2000 > 0.85  # two independent draws agree in about 0.05


def test_unseeded_chains_differ() -> None:
    flat = Distribution(np.arange(1000), np.full(1000, 0.001))
    one, two = SamplingChain(SamplingParams()), SamplingChain(SamplingParams())
    assert [one.draw(flat) for _ in range(20)] != [two.draw(flat) for _ in range(20)]


def test_noise_is_uniform_and_independent() -> None:
    """Over tokens, positions and seeds: mean, variance, and correlation with the neighbour."""
    ids = np.arange(500)
    u = np.array([[uniforms(s, p, ids) for p in range(40)] for s in range(5)])
    assert 0 < u.min() < u.max() < 1
    assert u.mean() == pytest.approx(0.5, abs=0.004)  # 4 sigma of 100,000
    assert u.var() == pytest.approx(1 / 12, abs=0.001)
    for axis in range(3):
        a, b = np.delete(u, -1, axis).ravel(), np.delete(u, 0, axis).ravel()
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.014
    few = uniforms(3, 4, np.array([17, 4]))
    assert few.tolist() == uniforms(3, 4, ids)[[17, 4]].tolist()
    assert uniforms(1 << 64 | 3, 4, ids).tolist() == uniforms(3, 4, ids).tolist()


def test_a_very_low_temperature_draws_the_likeliest() -> None:
    logits = np.array([1.0, 9.0, 4.0], np.float32)
    chain = SamplingChain(SamplingParams(1e-3, 0, 1.0, 0.0, seed=1))
    assert {chain.draw(chain.target_probs(logits), range(k)) for k in range(50)} == {1}


@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_a_look_is_the_likeliest_token_and_its_softmax_near_the_top(spread: float) -> None:
    logits = (spread * np.random.default_rng(1).standard_normal(5000)).astype(np.float32)
    near = softmax(logits[logits >= logits.max() - 8])
    for params in (SamplingParams(temperature=0), SamplingParams(1.0), SamplingParams(seed=1)):
        law, sure = SamplingChain(params).draft_probs(logits)
        assert law.ids.tolist() == [logits.argmax()]
        assert sure == pytest.approx(near.max(), rel=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 1.5])
def test_a_look_is_the_law_where_everything_may_come(temperature: float) -> None:
    chain = SamplingChain(SamplingParams(temperature, 0, 1.0, 0.0))
    logits = np.random.default_rng(1).standard_normal(5000).astype(np.float32)
    law, expected = chain.draft_probs(logits)[0], chain.target_probs(logits)
    assert len(law.ids) == 5000
    assert law.probs.tolist() == expected.probs.tolist()
    for params in (SamplingParams(0.9, 0, 1.0, 0.0), SamplingParams(1.0, 0, 0.99, 0.0)):
        assert len(SamplingChain(params).draft_probs(logits)[0].ids) == 1


def test_a_look_knows_penalties_and_what_is_allowed() -> None:
    logits = np.array([5, 4, 3, 1], np.float32)
    params = SamplingParams(0.7, presence_penalty=10.0, logit_bias=((1, float("-inf")),))
    assert SamplingChain(params).draft_probs(logits, [0])[0].ids.tolist() == [2]


def test_penalties_slide_over_prompt_answer_and_draft() -> None:
    """Row k sees draft[:k], and a refused draft leaves nothing behind."""
    params = SamplingParams(1.0, 0, 1.0, 0.0, presence_penalty=50.0, repeat_last_n=3)
    chain, logits = SamplingChain(params, [0, 1, 2, 3]), np.zeros(8, np.float32)

    def banned(after: list[int]) -> set[int]:
        law = chain.target_probs(logits, after)
        return {int(i) for i, p in zip(law.ids, law.probs, strict=True) if p < 1e-9}

    assert banned([]) == {1, 2, 3}
    assert banned([5]) == {2, 3, 5}
    assert banned([5, 5]) == {3, 5}
    assert banned([5, 6, 7, 0]) == {6, 7, 0}
    assert banned([]) == {1, 2, 3}
    chain.commit([5, 5])
    assert banned([]) == {3, 5}
    assert banned([6]) == {5, 6}


def test_penalties_count_as_a_plain_count_does() -> None:
    rng = np.random.default_rng(2)
    params = SamplingParams(1.0, 0, 1.0, 0.0, frequency_penalty=0.5, repeat_last_n=10)
    history, logits = rng.integers(0, 9, 25).tolist(), np.zeros(9, np.float32)
    chain = SamplingChain(params, history)
    for _ in range(40):
        after = rng.integers(0, 9, rng.integers(0, 5)).tolist()
        law, counts = chain.target_probs(logits, after), Counter([*history, *after][-10:])
        expected = softmax(np.array([-0.5 * counts[i] for i in range(9)]))
        assert law.probs[law.ids.argsort()] == pytest.approx(expected, rel=1e-5)
        new = rng.integers(0, 9, rng.integers(0, 4)).tolist()
        history += new
        chain.commit(new)


def test_a_bias_for_no_token_does_nothing() -> None:
    chain = SamplingChain(SamplingParams(logit_bias=((1 << 30, 5.0),)))
    assert chain.target_probs(np.array([0, 9], np.float32)).ids.tolist() == [1]


# -- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.01),
        ("min_p", 2.0),
        ("seed", -1),
        ("typical_p", 0.0),
        ("typical_p", 1.01),
        ("repeat_penalty", 0.0),
        ("repeat_penalty", float("inf")),
        ("repeat_last_n", -2),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", float("inf")),
    ],
)
def test_values_out_of_range_are_named(field: str, value: float) -> None:
    with pytest.raises(RequestError, match=field) as error:
        SamplingParams(**{field: value})
    assert str(value) in str(error.value)


@pytest.mark.parametrize("pair", [(-1, 0.0), (3, float("inf")), (3, float("nan"))])
def test_a_bias_that_means_nothing_is_named(pair: tuple[int, float]) -> None:
    with pytest.raises(RequestError, match=f"token {pair[0]} the bias {pair[1]}"):
        SamplingParams(logit_bias=(pair,))


def test_a_bias_past_the_vocabulary_is_named() -> None:
    params = SamplingParams(logit_bias=((9, 1.0), (10, 1.0)))
    params.check_vocabulary(11)
    with pytest.raises(RequestError, match="token 10, but the vocabulary ends at 9"):
        params.check_vocabulary(10)


def test_biases_are_read_as_llama_cpp_reads_them() -> None:
    assert bias_of("15043+1") == (15043, 1.0)
    assert bias_of("7-2.5") == (7, -2.5)
    assert bias_of("7-inf") == (7, float("-inf"))
    for text in ("7", "7*2", "x+1", "-1+2", "7+", "7+nan", "7+1 ", ""):
        with pytest.raises(RequestError, match="is not a bias") as error:
            bias_of(text)
        assert repr(text) in str(error.value)


def test_sampler_names_are_read_as_llama_cpp_reads_them() -> None:
    names = ["PENALTIES", "dry", "top-n-sigma", "topk", "typ-p", "nucleus", "minp", "xtc", "temp"]
    assert sampler_order(names) == SAMPLERS
    assert sampler_order(sorted(NEVER_ON)) == ()
    with pytest.raises(RequestError, match="'mirostat'"):
        sampler_order(["mirostat"])
    with pytest.raises(RequestError, match="top_k appears twice"):
        sampler_order(["top_k", "topk"])
    with pytest.raises(RequestError, match="must be named as in"):
        SamplingParams(samplers=("topk",))


def test_a_value_of_another_type_is_named() -> None:
    with pytest.raises(RequestError, match="temperature is 'a', but must be a number"):
        SamplingParams(temperature="a")  # type: ignore[arg-type]


def test_samplers_in_one_text_are_letters_or_names() -> None:
    assert sampler_order("edskypmxt") == SAMPLERS
    assert sampler_order("temp;top-k") == ("temperature", "top_k")
    assert sampler_order("temp") == ("temperature",)
    assert sampler_order("tk") == ("temperature", "top_k")
    with pytest.raises(RequestError, match="top_k appears twice"):
        sampler_order("kk")
    with pytest.raises(RequestError, match="'topz'"):
        sampler_order("topz")


def test_a_negative_count_of_logprobs_is_named() -> None:
    with pytest.raises(RequestError, match="n_logprobs is -1"):
        RequestOptions(n_logprobs=-1)
