"""Logits to distributions, and draws from them.

The filters and their order are llama.cpp's defaults: top-k, top-p, min-p, then temperature
(`common_params_sampling::samplers`); top-p and min-p look at the distribution before temperature.
Pure numpy; it knows nothing of drafts, models or text.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from gguf_mtp.types import Distribution, Floats, SamplingParams

_MARGINS = (np.float32(8), np.float32(16))
"""How far below the maximum the largest logits are looked for, before all are."""
_FIRST_LOOK = 1024
"""How many of the largest logits top-p tries before it sorts them all."""

_CERTAIN = np.ones(1)


class Chain:
    """The sampling chain of one sequence: its parameters and its random numbers.

    A `types.Chain`. The same seed and the same calls give the same draws.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self._rng = np.random.Generator(np.random.PCG64(params.seed))
        self.is_greedy = params.temperature == 0

    def law(self, logits: Floats) -> Distribution:
        """The distribution of the next token. `logits`: float32 [n_vocab]."""
        if self.is_greedy:
            return Distribution(np.array([logits.argmax()]), _CERTAIN)
        return filtered(logits, self.params)

    def draw(self, law: Distribution) -> int:
        """One token drawn from `law`."""
        if len(law.ids) == 1:
            return int(law.ids[0])
        at = law.probs.cumsum().searchsorted(self.uniform(), side="right")
        return int(law.ids[min(int(at), len(law.ids) - 1)])  # the sum may end just below 1

    def uniform(self) -> float:
        """A number in [0, 1)."""
        return float(self._rng.random())


def filtered(logits: Floats, params: SamplingParams) -> Distribution:
    """top-k, top-p, min-p and temperature over float32 [n_vocab]; `params.temperature` > 0.

    Ids come by falling probability. At least one token survives every filter.
    """
    ids = _candidates(logits, params)
    kept = logits[ids].astype(np.float64)
    if params.top_p < 1:
        weights = np.exp(kept - kept[0])
        total = weights.sum() if params.top_k else _sum_exp(logits, float(kept[0]))
        n = int(weights.cumsum().searchsorted(params.top_p * total)) + 1
        ids, kept = ids[:n], kept[:n]
    if params.min_p > 0:
        n = int(np.count_nonzero(kept >= kept[0] + math.log(params.min_p)))
        ids, kept = ids[:n], kept[:n]
    weights = np.exp((kept - kept[0]) / params.temperature)
    return Distribution(ids, weights / weights.sum())


def confidence(logits: Floats) -> float:
    """The largest probability of softmax(logits); float32 [n_vocab]."""
    return 1.0 / _sum_exp(logits, float(logits.max()))


def probability(law: Distribution, token: int) -> float:
    """The probability of `token` under `law`; 0 when a filter removed it."""
    at = (law.ids == token).nonzero()[0]
    return float(law.probs[at[0]]) if len(at) else 0.0


def _candidates(logits: Floats, params: SamplingParams) -> NDArray[np.int64]:
    """Ids by falling logit: the top-k, or as many as top-p can keep, or all."""
    n_vocab = len(logits)
    if params.top_k:
        return largest(logits, min(params.top_k, n_vocab))
    if params.top_p < 1 and n_vocab > _FIRST_LOOK:
        ids = largest(logits, _FIRST_LOOK)
        kept = logits[ids].astype(np.float64)
        if np.exp(kept - kept[0]).sum() >= params.top_p * _sum_exp(logits, float(kept[0])):
            return ids
    return largest(logits, n_vocab)


def largest(logits: Floats, k: int) -> NDArray[np.int64]:
    """Ids of the `k` largest logits, falling; equal logits by rising id."""
    n_vocab = len(logits)
    if k >= n_vocab:
        ids = np.arange(n_vocab)
    else:
        ids = _near_the_top(logits, k)
        ids = ids[_top(logits[ids], k)]
        ids.sort()
    return ids[(-logits[ids]).argsort(kind="stable")]


def _near_the_top(logits: Floats, k: int) -> NDArray[np.int64]:
    """Some ids, few if possible, with the `k` largest among them.

    Comparing with a bound is several times cheaper than a partition of the whole vocabulary.
    """
    peak = logits.max()
    for margin in _MARGINS:
        ids: NDArray[np.int64] = (logits >= peak - margin).nonzero()[0]
        if len(ids) >= k:
            return ids
    return np.arange(len(logits))


def _top(values: Floats, k: int) -> NDArray[np.int64]:
    if k >= len(values):
        return np.arange(len(values))
    return values.argpartition(len(values) - k)[len(values) - k :]


def _sum_exp(logits: Floats, peak: float) -> float:
    return float(np.exp(logits - np.float32(peak)).sum(dtype=np.float64))
