"""The chain against llama.cpp's own samplers, on rows of many shapes."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from types import ModuleType

import llama_cpp as L
import numpy as np
import pytest

from gguf_mtp.params import SAMPLERS, SamplingParams
from gguf_mtp.sampling import chain as sampling
from gguf_mtp.sampling import filters
from gguf_mtp.sampling.chain import SamplingChain
from gguf_mtp.sampling.filters import Candidates
from gguf_mtp.sampling.penalties import penalised
from gguf_mtp.types import Distribution

pytestmark = pytest.mark.native

N_VOCAB = 500


def llama_law(logits: np.ndarray, p: SamplingParams, history: list[int]) -> dict[int, float]:
    """Token to probability after the samplers that llama-server would make of `p`."""
    chain = L.llama_sampler_chain_init(L.llama_sampler_chain_default_params())
    made = {
        "penalties": lambda: L.llama_sampler_init_penalties(
            N_VOCAB,
            len(history) if p.repeat_last_n == -1 else p.repeat_last_n,
            p.repeat_penalty,
            p.frequency_penalty,
            p.presence_penalty,
        ),
        "top_k": lambda: L.llama_sampler_init_top_k(p.top_k),
        "typ_p": lambda: L.llama_sampler_init_typical(p.typical_p, 0),
        "top_p": lambda: L.llama_sampler_init_top_p(p.top_p, 0),
        "min_p": lambda: L.llama_sampler_init_min_p(p.min_p, 0),
        "temperature": lambda: L.llama_sampler_init_temp(p.temperature),
    }
    biases = (L.llama_logit_bias * len(p.logit_bias))(*p.logit_bias)
    bias = L.llama_sampler_init_logit_bias(N_VOCAB, len(biases), biases)
    L.llama_sampler_chain_add(chain, bias)
    for name in p.samplers:
        L.llama_sampler_chain_add(chain, made[name]())
    for token in history:
        L.llama_sampler_accept(chain, token)
    cells = (L.llama_token_data * N_VOCAB)()
    for i, x in enumerate(logits.tolist()):
        cells[i].id, cells[i].logit = i, x
    array = L.llama_token_data_array(cells, N_VOCAB, -1, False)
    L.llama_sampler_apply(chain, ctypes.byref(array))
    left = {cells[i].id: cells[i].logit for i in range(array.size)}
    L.llama_sampler_free(chain)
    peak = max(left.values())
    weights = {i: np.exp(x - peak) for i, x in left.items() if x > -np.inf}
    return {i: w / sum(weights.values()) for i, w in weights.items()}


def cases() -> list[tuple[np.ndarray, SamplingParams, list[int]]]:
    """A ban meets no typical sampling: llama.cpp's entropy is NaN then (0 log 0)."""
    rng, made = random.Random(4), []
    for seed in range(120):
        order = list(SAMPLERS) if seed % 2 else rng.sample(SAMPLERS, rng.randint(1, 6))
        typical_p = rng.choice([0.2, 0.8, 1.0, 1.0])
        lowest = -20.0 if typical_p < 1 else float("-inf")
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.3, 0.8, 1.0, 1.6]),
            top_k=rng.choice([0, 1, 7, 40]),
            top_p=rng.choice([0.3, 0.9, 1.0]),
            min_p=rng.choice([0.0, 0.02, 0.3]),
            typical_p=typical_p,
            repeat_penalty=rng.choice([0.8, 1.0, 1.3]),
            repeat_last_n=rng.choice([-1, 0, 5, 64]),
            presence_penalty=rng.choice([0.0, 0.6]),
            frequency_penalty=rng.choice([0.0, -0.2, 0.4]),
            logit_bias=rng.choice([(), ((3, 5.0), (8, lowest)), ((499, 12.5),)]),
            samplers=tuple(order),
        )
        spread = rng.choice([0.5, 2.0, 6.0])
        logits = spread * np.random.default_rng(seed).standard_normal(N_VOCAB)
        row = logits.astype(np.float32)
        likely = row.argsort()[-rng.choice([30, N_VOCAB]) :].tolist()
        history = rng.choices(likely, k=rng.choice([1, 20, 90]))
        made.append((row, params, history))
    return made


def distance(law: Distribution, expected: dict[int, float]) -> float:
    """Half the sum of |p - p'|."""
    mine = dict(zip(law.ids.tolist(), law.probs.tolist(), strict=True))
    return sum(abs(mine.get(i, 0.0) - expected.get(i, 0.0)) for i in mine | expected) / 2


def furthest() -> float:
    return max(
        distance(SamplingChain(p, h).target_probs(row), llama_law(row, p, h))
        for row, p, h in cases()
    )


def test_every_chain_is_llama_cpps() -> None:
    assert furthest() < 1e-5


def scaled(name: str) -> Callable[..., Candidates]:
    original = getattr(filters, name)
    return lambda c, p: original(c, 0.9 * p)


def divided(logits: np.ndarray, counts: np.ndarray, p: SamplingParams) -> np.ndarray:
    """Negative logits become likelier, as in the paper that had the idea."""
    return penalised(np.abs(logits), counts, p) * np.sign(logits)


def one_more(c: Candidates, n: int) -> Candidates:
    return Candidates(c.ids[: n + 1], c.logits[: n + 1])


MUTANTS = [
    (filters, "_typical", scaled("_typical")),
    (filters, "_top_p", scaled("_top_p")),
    (filters, "_first", one_more),
    (sampling, "penalised", divided),
]


@pytest.mark.parametrize(("module", "name", "mutant"), MUTANTS)
def test_mutants_are_caught(
    module: ModuleType, name: str, mutant: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, mutant)
    assert furthest() > 0.001
