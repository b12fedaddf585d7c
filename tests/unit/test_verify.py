"""Verification: whatever is drafted, the output follows the target's law."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from gguf_mtp.params import SamplingParams
from gguf_mtp.sampling import verify as module
from gguf_mtp.sampling.chain import SamplingChain
from gguf_mtp.sampling.verify import residual, verify
from gguf_mtp.types import Distribution, Draft

N_DRAWS = 20_000
P = [
    Distribution(np.array([2, 0, 5, 1]), np.array([0.4, 0.3, 0.2, 0.1])),
    Distribution(np.array([1, 2, 3]), np.array([0.6, 0.3, 0.1])),
    Distribution(np.array([0, 4]), np.array([0.5, 0.5])),
]
Q = Distribution(np.array([0, 2, 3]), np.array([0.6, 0.1, 0.3]))
"""Overlaps the target's law in part: 3 is never right at the first place, 5 and 1 never drafted."""


def unseeded(seed: int) -> SamplingChain:
    return SamplingChain(SamplingParams(), rng=np.random.default_rng(seed))


def outputs(
    make_draft: Callable[[SamplingChain], Draft], n: int = N_DRAWS
) -> Counter[tuple[int, int]]:
    """The first two tokens that come out, over `n` rounds."""
    chain, seen = unseeded(3), Counter()
    for _ in range(n):
        draft = make_draft(chain)
        verdict = verify(draft, lambda k: P[k], chain)
        out = [*draft.tokens[: verdict.n_accepted], verdict.next_token]
        if len(out) == 1:  # plain decoding draws the second one
            out.append(chain.draw(P[1]))
        seen[out[0], out[1]] += 1
    return seen


def chi_square(seen: Counter[tuple[int, int]]) -> float:
    """Against the product of the laws: 12 cells, 11 degrees of freedom."""
    n, total = sum(seen.values()), 0.0
    assert {a for a, _ in seen} <= set(P[0].ids.tolist())
    for a, pa in zip(P[0].ids, P[0].probs, strict=True):
        for b, pb in zip(P[1].ids, P[1].probs, strict=True):
            total += (seen[int(a), int(b)] - n * pa * pb) ** 2 / (n * pa * pb)
    return total


BOUND = 31.3  # chi-square, 11 degrees of freedom, p = 0.001


def sampled(chain: SamplingChain) -> Draft:
    tokens = [chain.draw(Q), chain.draw(Q)]
    return Draft(tokens, [Q, Q], [0.6, 0.6], "fake")


def certain(_: SamplingChain) -> Draft:
    return Draft([0, 2], [None, None], [0.9, 0.9], "fake")


def empty(_: SamplingChain) -> Draft:
    return Draft([], [], [], "fake")


@pytest.mark.parametrize("make_draft", [sampled, certain, empty])
def test_output_follows_the_target(make_draft: Callable[[SamplingChain], Draft]) -> None:
    assert chi_square(outputs(make_draft)) < BOUND


def test_mutant_that_draws_anew_from_p_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "residual", lambda p, *_: p)
    assert chi_square(outputs(sampled, 5_000)) > BOUND


def test_mutant_that_misstates_the_drafts_law_is_caught() -> None:
    flat = Distribution(Q.ids, np.full(3, 1 / 3))

    def mutant(chain: SamplingChain) -> Draft:
        return sampled(chain)._replace(probs=[flat, flat])

    assert chi_square(outputs(mutant, 5_000)) > BOUND


def test_acceptance_is_the_overlap_of_the_laws() -> None:
    """E[accepted] = sum min(p, q) = 0.3 + 0.1 for the first token (arXiv 2211.17192, theorem
    3.5)."""
    chain, n_accepted = unseeded(5), 0
    for _ in range(5_000):
        draft = Draft([chain.draw(Q)], [Q], [0.6], "fake")
        n_accepted += verify(draft, lambda k: P[k], chain).n_accepted
    assert n_accepted / 5_000 == pytest.approx(0.4, abs=0.024)  # 3.5 sigma


def test_greedy_keeps_the_targets_own_choices() -> None:
    point = [Distribution(np.array([t]), np.ones(1)) for t in (4, 8, 6)]
    chain = SamplingChain(SamplingParams(temperature=0))
    for draft, expected in [
        ([4, 8], (2, 6)),
        ([4, 9], (1, 8)),
        ([5, 8], (0, 4)),
        ([], (0, 4)),
    ]:
        made = Draft(draft, [None] * len(draft), [1.0] * len(draft), "fake")
        assert verify(made, lambda k: point[k], chain) == expected


def test_a_seed_keeps_what_the_target_draws_itself() -> None:
    """Whatever was drafted, and whatever its law is said to be, the text is the seed's."""
    rng = np.random.default_rng(0)
    for seed in range(200):
        chain = SamplingChain(SamplingParams(seed=seed), [1, 2])
        own = [chain.draw(P[k], range(k)) for k in range(3)]
        draft = Draft(rng.integers(0, 6, 2).tolist(), [Q, None], [0.6, 0.6], "fake")
        n, token = verify(draft, lambda k: P[k], chain)
        assert [*draft.tokens[:n], token] == own[: n + 1]
        assert n == 2 or draft.tokens[n] != own[n]


def test_a_seeds_draft_is_right_where_the_laws_are_equal() -> None:
    for seed in range(100):
        chain = SamplingChain(SamplingParams(seed=seed))
        tokens: list[int] = []
        for k in range(2):
            tokens.append(chain.draw(P[k], tokens))
        draft = Draft(tokens, P[:2], [0.5, 0.5], "fake")
        assert verify(draft, lambda k: P[k], chain).n_accepted == 2


def test_rows_behind_a_refusal_are_not_looked_at() -> None:
    asked = []

    def target(k: int) -> Distribution:
        asked.append(k)
        return Distribution(np.array([1]), np.ones(1))

    verify(Draft([0, 1, 1], [None] * 3, [1.0] * 3, "fake"), target, SamplingChain(SamplingParams()))
    assert asked == [0]


def test_residual_is_the_positive_part() -> None:
    law = residual(P[0], Q)
    assert dict(zip(law.ids.tolist(), law.probs, strict=True)) == pytest.approx(
        {2: 0.3 / 0.6, 0: 0.0, 5: 0.2 / 0.6, 1: 0.1 / 0.6}
    )
    assert residual(P[0], P[0]) is P[0]  # equal laws: a refusal is a rounding error
