"""Log-probabilities of a row, the likeliest ids beside them."""

from __future__ import annotations

import numpy as np
import pytest

from gguf_mtp.sampling.logprobs import logprobs_of


@pytest.mark.parametrize("n_top", [0, 1, 3, 50, 99])
def test_they_are_the_log_softmax(n_top: int) -> None:
    logits = (5 * np.random.default_rng(n_top).standard_normal(50)).astype(np.float32)
    expected = np.log(np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum())
    entry = logprobs_of(logits, 7, n_top)
    assert entry.token == 7
    assert entry.logprob == pytest.approx(expected[7], abs=1e-5)
    best = (-logits).argsort(kind="stable")[:n_top]
    assert [i for i, _ in entry.top] == best.tolist()
    assert [p for _, p in entry.top] == pytest.approx(expected[best].tolist(), abs=1e-5)


def test_equal_logits_come_by_id_and_large_ones_overflow_nothing() -> None:
    entry = logprobs_of(np.array([3, 900, 900, 900, 2], np.float32), 0, 2)
    assert [i for i, _ in entry.top] == [1, 2]
    assert entry.top[0][1] == pytest.approx(-np.log(3))
    assert entry.logprob == pytest.approx(-897 - np.log(3), abs=1e-4)
