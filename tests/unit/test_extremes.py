"""Numbers that no logit needs: those that are taken make distributions, the others are refused."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from gguf_mtp.errors import RequestError
from gguf_mtp.params import LARGEST, SamplingParams
from gguf_mtp.sampling.chain import SamplingChain

LOGITS = np.array([-80.0, -3.0, 0.0, 2.5, 90.0], np.float32)
SMALLEST = 1 / LARGEST


@pytest.mark.parametrize("temperature", [0.0, SMALLEST, 1.0, LARGEST])
@pytest.mark.parametrize("repeat_penalty", [SMALLEST, 1.0, LARGEST])
def test_the_largest_and_the_smallest_make_a_distribution(
    temperature: float, repeat_penalty: float
) -> None:
    """Warnings are errors here: no infinity comes up, and nothing that is no number."""
    ends = (-LARGEST, 0.0, LARGEST)
    for presence, frequency, bias in itertools.product(ends, ends, (*ends, -math.inf)):
        params = SamplingParams(
            temperature=temperature,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            repeat_penalty=repeat_penalty,
            presence_penalty=presence,
            frequency_penalty=frequency,
            logit_bias=((0, bias), (4, bias)),
        )
        law = SamplingChain(params, [0, 2, 2, 4]).target_probs(LOGITS.copy())
        assert law.probs.sum() == pytest.approx(1)
        assert (law.probs >= 0).all()


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 1e-300},
        {"temperature": 1e300},
        {"temperature": math.nan},
        {"temperature": -1.0},
        {"repeat_penalty": 1e-300},
        {"repeat_penalty": 1e300},
        {"repeat_penalty": math.nan},
        {"presence_penalty": 1e300},
        {"presence_penalty": math.nan},
        {"frequency_penalty": -1e300},
        {"frequency_penalty": -math.inf},
        {"logit_bias": ((0, 1e300),)},
        {"logit_bias": ((0, -1e300),)},
        {"logit_bias": ((0, math.inf),)},
        {"logit_bias": ((0, math.nan),)},
    ],
)
def test_beyond_them_float32_ends(values: dict[str, float]) -> None:
    """An answer was drawn from what is no distribution, and nobody was told."""
    (name,) = values
    with pytest.raises(RequestError, match=name):
        SamplingParams(**values)  # type: ignore[arg-type]
