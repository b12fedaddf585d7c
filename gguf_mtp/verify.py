"""Lossless acceptance: a draft and the target's distributions in, a verdict out.

The rule is speculative sampling (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv
2302.01318): a token x drawn from q is kept with probability min(1, p(x) / q(x)); the first one
refused is replaced by a draw from the positive part of p - q. Whatever q was, the output follows p.
At temperature 0 p is a point mass and the rule is "keep it while it is the target's own choice".
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gguf_mtp.sampling import Chain, probability
from gguf_mtp.types import Distribution, Draft, Verdict


def verify(draft: Draft, target: Callable[[int], Distribution], chain: Chain) -> Verdict:
    """Judges `draft`. `target(k)` is the target's distribution after `draft.tokens[:k]`.

    It is asked for k = 0, 1, ... only as far as tokens are kept: the rest of the rows cost nothing.
    """
    for k, token in enumerate(draft.tokens):
        p, q = target(k), draft.laws[k]
        p_token = probability(p, token)
        q_token = 1.0 if q is None else probability(q, token)
        if chain.uniform() * q_token >= p_token:
            return Verdict(k, chain.draw(residual(p, q, token)))
    return Verdict(len(draft.tokens), chain.draw(target(len(draft.tokens))))


def residual(p: Distribution, q: Distribution | None, token: int) -> Distribution:
    """The positive part of p - q, normalised; `q` None is a point mass on `token`."""
    left = p.probs.copy()
    if q is None:
        left[p.ids == token] = 0.0
    else:
        order = p.ids.argsort()
        at = order[np.minimum(p.ids.searchsorted(q.ids, sorter=order), len(order) - 1)]
        shared = p.ids[at] == q.ids
        left[at[shared]] -= q.probs[shared]
        np.maximum(left, 0.0, out=left)
    total = left.sum()
    if total <= 0.0:  # p == q up to rounding: a refusal had probability zero
        return p
    return Distribution(p.ids, left / total)
