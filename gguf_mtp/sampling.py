"""Logits to distributions, and draws from them.

The filters and their order are llama.cpp's defaults: top-k, top-p, min-p, then temperature
(`common_params_sampling::samplers`); top-p and min-p look at the distribution before temperature.
Pure numpy; it knows nothing of drafts, models or text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gguf_mtp.params import Constraint, SamplingParams
from gguf_mtp.types import Distribution, Floats

_MARGIN = np.float32(8)
"""How far below the maximum the likeliest tokens are looked for, before all are."""
_CERTAIN = np.ones(1)


class Chain:
    """The sampling chain of one sequence: its parameters and its random numbers.

    A `types.Chain`. The same seed and the same calls give the same draws.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int] = (),
        constraint: Constraint | None = None,
    ) -> None:
        self.params = params
        self._rng = np.random.Generator(np.random.PCG64(params.seed))
        self.is_greedy = params.temperature == 0

    def law(self, logits: Floats, after: Sequence[int] = ()) -> Distribution:
        """The distribution of the next token. `logits`: float32 [n_vocab]."""
        if self.is_greedy:
            return Distribution(np.array([logits.argmax()]), _CERTAIN)
        return filtered(logits, self.params)

    def look(self, logits: Floats, after: Sequence[int] = ()) -> tuple[Distribution, float]:
        """As `law`, and the confidence of the unfiltered distribution, in one pass over the row.

        Confidence is the largest probability among the tokens near the top: what the rest would add
        to the sum is left out, for it is a measure to be calibrated, not a law.
        """
        ids = near_the_top(logits)
        values = logits[ids]
        sure = float(1 / np.exp(values - values.max()).sum(dtype=np.float64))
        if self.is_greedy:
            return Distribution(ids[values.argmax()][None], _CERTAIN), sure
        return filtered(logits, self.params, ids), sure

    def draw(self, law: Distribution, after: Sequence[int] = ()) -> int:
        """One token drawn from `law`."""
        if len(law.ids) == 1:
            return int(law.ids[0])
        at = law.probs.cumsum().searchsorted(self.uniform(), side="right")
        return int(law.ids[min(int(at), len(law.ids) - 1)])  # the sum may end just below 1

    def commit(self, tokens: Sequence[int]) -> None:
        """These have joined the answer."""

    def uniform(self) -> float:
        """A number in [0, 1)."""
        return float(self._rng.random())


def near_the_top(logits: Floats) -> NDArray[np.int64]:
    """Ids of the tokens within `_MARGIN` of the maximum, rising.

    A comparison is several times cheaper than sorting or partitioning a whole vocabulary.
    """
    ids: NDArray[np.int64] = (logits >= logits.max() - _MARGIN).nonzero()[0]
    return ids


def filtered(
    logits: Floats, params: SamplingParams, near: NDArray[np.int64] | None = None
) -> Distribution:
    """top-k, top-p, min-p and temperature over float32 [n_vocab]; `params.temperature` > 0.

    Ids come by falling probability. At least one token survives every filter. `near` is
    `near_the_top(logits)` when the caller has it.
    """
    if params.min_p > 0:  # the likeliest token passes every filter: alone here, it is the law
        passing = (logits >= logits.max() + np.float32(math.log(params.min_p))).nonzero()[0]
        if len(passing) == 1:
            return Distribution(passing, _CERTAIN)
    near = near_the_top(logits) if near is None else near
    ids, total = _candidates(logits, params, near)
    kept = logits[ids].astype(np.float64)
    kept -= kept[0]
    n = len(kept)
    if params.top_p < 1:
        sums = np.exp(kept).cumsum()
        n = int(sums.searchsorted(params.top_p * (total or sums[-1]))) + 1
    if params.min_p > 0:  # `kept` falls, so those that pass are the first ones
        n = min(n, int(np.count_nonzero(kept >= math.log(params.min_p))))
    weights = np.exp(kept[:n] / params.temperature)
    weights /= weights.sum()
    return Distribution(ids[:n], weights)


def probability(law: Distribution, token: int) -> float:
    """The probability of `token` under `law`; 0 when a filter removed it."""
    at = (law.ids == token).nonzero()[0]
    return float(law.probs[at[0]]) if len(at) else 0.0


def _candidates(
    logits: Floats, params: SamplingParams, near: NDArray[np.int64]
) -> tuple[NDArray[np.int64], float | None]:
    """Ids by falling logit that the filters choose from, few if possible; and the sum of
    exp(logit - maximum) that top-p is measured against, where that is not theirs alone."""
    everything = np.arange(len(logits))
    if params.top_k:
        ids = near if len(near) >= params.top_k else everything
        return _largest(logits, ids, params.top_k), None
    if params.top_p < 1:
        total = float(np.exp(logits - logits.max()).sum(dtype=np.float64))
        ids = _largest(logits, near, len(near))
        if np.exp(logits[ids] - logits[ids[0]]).sum(dtype=np.float64) >= params.top_p * total:
            return ids, total
        return _largest(logits, everything, len(logits)), total
    is_enough = params.min_p > 0 and math.log(params.min_p) > -_MARGIN
    return _largest(logits, near if is_enough else everything, len(logits)), None


def _largest(logits: Floats, ids: NDArray[np.int64], k: int) -> NDArray[np.int64]:
    """The `k` of `ids` (rising) with the largest logits, falling; equal logits by rising id."""
    if k < len(ids):
        values = logits[ids]
        ids = ids[values.argpartition(len(ids) - k)[len(ids) - k :]]
        ids.sort()
    order = (-logits[ids]).argsort(kind="stable")
    return ids[order]
