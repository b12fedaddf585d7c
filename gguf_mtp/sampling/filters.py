"""From a row of logits to the distribution that is drawn from: llama.cpp's samplers, in any order.

top-k, locally typical (arXiv 2202.00666), top-p and min-p keep some of the tokens; temperature
bends what is left. Each looks at what the ones before it have left. Pure numpy; it knows nothing of
drafts, models or text.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gguf_mtp.params import SamplingParams
from gguf_mtp.sampling.penalties import Seen, is_penalising, penalised
from gguf_mtp.sampling.rows import MARGIN, Ids, Row
from gguf_mtp.types import Distribution, Floats

CERTAIN = np.ones(1)

_KEEPS_THE_TOP = frozenset({"top_k", "top_p", "min_p", "temperature"})
"""After these the likeliest token is still there, and still the likeliest."""


class Candidates(NamedTuple):
    """Tokens that may still come. `logits`: float64 [n], falling unless no sampler needs an order.

    `total`: the sum of exp(logit - largest) over these and the tokens that were left out unsorted,
    where it is not theirs alone.
    """

    ids: Ids
    logits: NDArray[np.float64]
    total: float | None = None


Step = Callable[[Candidates, Seen | None], Candidates]


class Filters:
    """The samplers of some `SamplingParams`, made ready once for many rows.

    `changes_rows`: penalties come first, so rows come with them. `counts_late`: they come later.
    `takes_the_top`: temperature 0, and nothing before it that the likeliest token could fall to.
    `draws_drafts`: a draft drawn from its distribution is right more often than the likeliest
    token. So it is where the whole vocabulary may come, at temperature 1 and above; elsewhere the
    likeliest is as good at the first place, better behind it, and takes no filtering
    (bench/RESULTS.md, "Ways of drafting").
    """

    def __init__(self, params: SamplingParams) -> None:
        active = [name for name in params.samplers if _is_active(name, params)]
        self.changes_rows = active[:1] == ["penalties"]
        if self.changes_rows:
            del active[0]
        self.counts_late = "penalties" in active
        before = active[: active.index("temperature")] if "temperature" in active else active
        is_safe = set(active) <= _KEEPS_THE_TOP
        self.is_greedy = params.temperature == 0 and "temperature" in active
        self.takes_the_top = self.is_greedy and set(before) <= _KEEPS_THE_TOP
        self.draws_drafts = not active or (active == ["temperature"] and params.temperature > 1)
        self._start = _start(active, params)
        self._steps = [_step(name, params) for name in active]
        self._glance: float | None = None
        if is_safe and "min_p" in before:
            self._glance = math.log(params.min_p)

    def distribution(self, row: Row, seen: Seen | None = None) -> Distribution:
        """The distribution of the token; at least one survives. Where anything was filtered, ids
        come by falling probability. `seen` is for penalties that are not the first sampler."""
        if self.takes_the_top:
            return Distribution(np.array([row.best()]), CERTAIN)
        if self._glance is not None and row.is_plain:
            # The likeliest token passes every filter: alone above min-p, it is the distribution.
            passing = (row.logits >= row.peak + self._glance).nonzero()[0]
            if len(passing) == 1:
                return Distribution(passing, CERTAIN)
        candidates = self._start(row)
        for step in self._steps:
            candidates = step(candidates, seen)
        weights = np.exp(candidates.logits - candidates.logits.max())
        weights /= weights.sum()
        return Distribution(candidates.ids, weights)


def probability(dist: Distribution, token: int) -> float:
    """The probability of `token` under `dist`; 0 when a filter removed it."""
    at = (dist.ids == token).nonzero()[0]
    return float(dist.probs[at[0]]) if len(at) else 0.0


def _is_active(name: str, params: SamplingParams) -> bool:
    return {
        "penalties": is_penalising(params),
        "top_k": params.top_k > 0,
        "typ_p": params.typical_p < 1,
        "top_p": params.top_p < 1,
        "min_p": params.min_p > 0,
        "temperature": params.temperature != 1,
    }[name]


# -- where the samplers begin ------------------------------------------------------------------


def _start(active: list[str], params: SamplingParams) -> Callable[[Row], Candidates]:
    """What the samplers `active` need of a row, few candidates if possible."""
    cutting = [name for name in active if name != "temperature"]
    if not cutting:
        return _unsorted
    if cutting[0] == "top_k":  # temperature in front of it changes no order
        return lambda row: _most_likely(row, params.top_k)
    if active[0] == "top_p":
        return lambda row: _likeliest_part(row, params.top_p)
    if active[0] == "min_p" and math.log(params.min_p) > -MARGIN:
        return lambda row: _above(row, math.log(params.min_p))
    return lambda row: _falling(*row.everything())


def _unsorted(row: Row) -> Candidates:
    ids, logits = row.everything()
    return Candidates(ids, logits.astype(np.float64))


def _most_likely(row: Row, k: int) -> Candidates:
    ids, logits = row.near()
    if len(ids) < k:
        ids, logits = row.everything()
    if k < len(ids):
        best = logits.argpartition(len(ids) - k)[len(ids) - k :]
        best.sort()
        ids, logits = ids[best], logits[best]
    return _falling(ids, logits)


def _likeliest_part(row: Row, top_p: float) -> Candidates:
    """What is near the top where it holds `top_p` of the probability, everything elsewhere."""
    near = row.near()
    ids, logits = row.everything()
    peak = logits.max()
    total = float(np.exp(logits - peak).sum(dtype=np.float64))
    if np.exp(near[1] - peak).sum(dtype=np.float64) >= top_p * total:
        return _falling(*near)._replace(total=total)
    return _falling(ids, logits)._replace(total=total)


def _above(row: Row, log_min_p: float) -> Candidates:
    ids, logits = row.near()
    if not len(ids) or logits.max() + log_min_p < row.floor:
        ids, logits = row.everything()
    return _falling(ids, logits)


def _falling(ids: Ids, logits: Floats) -> Candidates:
    """`ids` (rising) by falling logit; equal logits by rising id."""
    order = (-logits).argsort(kind="stable")
    return Candidates(ids[order], logits[order].astype(np.float64))


# -- the samplers ------------------------------------------------------------------------------


def _step(name: str, params: SamplingParams) -> Step:
    if name == "penalties":
        return lambda c, seen: _late_penalties(c, seen, params)
    if name == "top_k":
        return lambda c, _: Candidates(c.ids[: params.top_k], c.logits[: params.top_k])
    if name == "typ_p":
        return lambda c, _: _typical(c, params.typical_p)
    if name == "top_p":
        return lambda c, _: _top_p(c, params.top_p)
    if name == "min_p":
        log_min_p = math.log(params.min_p)
        return lambda c, _: _first(c, int(np.count_nonzero(c.logits >= c.logits[0] + log_min_p)))
    if params.temperature == 0:
        return lambda c, _: _first(c, 1)
    return lambda c, _: Candidates(c.ids, c.logits / params.temperature)


def _first(c: Candidates, n: int) -> Candidates:
    return Candidates(c.ids[:n], c.logits[:n])


def _top_p(c: Candidates, top_p: float) -> Candidates:
    sums = np.exp(c.logits - c.logits[0]).cumsum()
    return _first(c, int(sums.searchsorted(top_p * (c.total or sums[-1]))) + 1)


def _typical(c: Candidates, typical_p: float) -> Candidates:
    """The tokens whose surprise is nearest to the one that is expected, up to `typical_p`."""
    logits = c.logits - c.logits[0]
    logs = logits - math.log(np.exp(logits).sum())
    probs = np.exp(logs)
    entropy = -(probs * logs).sum()
    far = np.abs(-logs - entropy)
    order = far.argsort(kind="stable")
    n = int(probs[order].cumsum().searchsorted(typical_p, side="right")) + 1
    kept = np.sort(order[:n])
    return Candidates(c.ids[kept], c.logits[kept])


def _late_penalties(c: Candidates, seen: Seen | None, params: SamplingParams) -> Candidates:
    """Penalties on what an earlier sampler left."""
    assert seen is not None
    if not len(seen.ids):
        return c
    at = np.minimum(seen.ids.searchsorted(c.ids), len(seen.ids) - 1)
    counts = np.where(seen.ids[at] == c.ids, seen.counts[at], np.float32(0))
    logits = penalised(c.logits.astype(np.float32), counts, params)
    by_id = c.ids.argsort()
    return _falling(c.ids[by_id], logits[by_id])
