"""The ways that bench/acceptance.py compares: exact each, and counted as they are."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from gguf_mtp.bench.acceptance import expected, verify_block
from gguf_mtp.params import SamplingParams
from gguf_mtp.sampling.chain import SamplingChain
from gguf_mtp.sampling.verify import verify
from gguf_mtp.types import Distribution, Draft
from tests.unit.test_verify import BOUND, P, Q, chi_square


def test_block_verification_keeps_the_law_and_accepts_no_less() -> None:
    chain = SamplingChain(SamplingParams(), rng=np.random.default_rng(1))
    seen, kept = Counter(), [0, 0]
    for _ in range(20_000):
        tokens = [chain.draw(Q), chain.draw(Q)]
        draft = Draft(tokens, [Q, Q], [0.6, 0.6], "fake")
        verdict = verify_block(draft, lambda k: P[k], chain)
        out = [*tokens[: verdict.n_accepted], verdict.next_token]
        if len(out) == 1:
            out.append(chain.draw(P[1]))
        seen[out[0], out[1]] += 1
        kept[0] += verdict.n_accepted
        kept[1] += verify(draft, lambda k: P[k], chain).n_accepted
    assert chi_square(seen) < BOUND
    assert kept[0] > kept[1]


def test_what_is_expected_is_what_happens() -> None:
    """Against 40,000 draws of each way, on laws that overlap in part."""
    rng = np.random.default_rng(0)
    ids = np.arange(6)
    p, q = rng.random(6), rng.random(6)
    p[4] = q[2] = 0.0
    p, q = p / p.sum(), q / q.sum()
    one, two = (Distribution(ids[x > 0], x[x > 0]) for x in (p, q))
    noise = rng.gumbel(size=(40_000, 6))
    with np.errstate(divide="ignore"):
        same = (np.log(p) + noise).argmax(1) == (np.log(q) + noise).argmax(1)
    residual, greedy, seed = expected(one, two)
    assert residual == pytest.approx(np.minimum(p, q).sum())
    assert greedy == pytest.approx(p[q.argmax()])
    assert seed == pytest.approx(same.mean(), abs=0.008)
