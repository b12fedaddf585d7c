"""Lossless acceptance: a draft and the target's distributions in, a verdict out.

A draft token that was certain to be drafted is kept while it is what the target draws: the draw is
the target's, whatever was drafted. The same goes where draft and target share their randomness
(temperature 0, or a seed). A token x that was drawn from a distribution q is kept with probability
min(1, p(x) / q(x)), and the first one refused is replaced by a draw from the positive part of
p - q: speculative sampling (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318).
Whatever q was, the output follows p.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gguf_mtp.sampling.chain import SamplingChain
from gguf_mtp.sampling.filters import probability
from gguf_mtp.types import Distribution, Draft, Verdict


def verify(draft: Draft, target: Callable[[int], Distribution], chain: SamplingChain) -> Verdict:
    """Judges `draft`. `target(k)` is the target's distribution after `draft.tokens[:k]`.

    It is asked for k = 0, 1, ... only as far as tokens are kept: the rest of the rows cost nothing.
    """
    tokens = draft.tokens
    for k, token in enumerate(tokens):
        p, q = target(k), draft.probs[k]
        if q is None or chain.is_coupled:
            own = chain.draw(p, tokens[:k])
            if own != token:
                return Verdict(k, own)
        elif chain.uniform() * probability(q, token) >= probability(p, token):
            return Verdict(k, chain.draw(residual(p, q), tokens[:k]))
    return Verdict(len(tokens), chain.draw(target(len(tokens)), tokens))


def residual(p: Distribution, q: Distribution) -> Distribution:
    """The positive part of p - q, normalised."""
    left = p.probs.copy()
    order = p.ids.argsort()
    at = order[np.minimum(p.ids.searchsorted(q.ids, sorter=order), len(order) - 1)]
    shared = p.ids[at] == q.ids
    left[at[shared]] -= q.probs[shared]
    np.maximum(left, 0.0, out=left)
    total = left.sum()
    if total <= 0.0:  # p == q up to rounding: a refusal had probability zero
        return p
    return Distribution(p.ids, left / total)
