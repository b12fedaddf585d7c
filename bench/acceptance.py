"""Acceptance of drafts with each method of drawing and verifying them. Counts, not times.

    python -m gguf_mtp.bench.acceptance [--depths 1,2,3] [--temps 0.3,0.7,1] [--open] [--rounds 4]

On the demo model, over its held-out prompts. The ways, all of them exact:

    residual   a token drawn from the draft's law is kept with min(1, p / q) (arXiv 2211.17192)
    block      the same drafts, judged as a whole (arXiv 2403.10444)
    greedy     the draft's likeliest token, kept with probability p
    seed       draft and target share Gumbel noise (arXiv 2408.07978); what an explicit seed does

Two texts drawn differ more than two ways do, so the first position is also computed: `expected` is
what each way would accept in the mean over the same rows, whose context is the target's own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import numpy as np

from ..demo import demo_model
from ..engine import request
from ..loading.loader import LoadOptions, load
from ..params import Constraint, SamplingParams
from ..sampling.chain import SamplingChain
from ..sampling.filters import CERTAIN, probability
from ..sampling.verify import verify
from ..session import Session
from ..stats import Stats
from ..types import Distribution, Draft, Verdict

N_TOKENS = 64
Verify = Callable[[Draft, Callable[[int], Distribution], SamplingChain], Verdict]


def verify_block(
    draft: Draft, target: Callable[[int], Distribution], chain: SamplingChain
) -> Verdict:
    """Algorithm 2 of arXiv 2403.10444. A draft may end anywhere that its own prefix decides."""
    tokens = draft.tokens
    laws = [target(k) for k in range(len(tokens) + 1)]
    weights = [1.0]
    for k, token in enumerate(tokens):
        q = draft.probs[k]
        ratio = probability(laws[k], token) / (1.0 if q is None else probability(q, token))
        weights.append(min(weights[-1] * ratio, 1.0))
    for n in range(len(tokens), -1, -1):
        if n == len(tokens):
            kept, left = weights[n], laws[n].probs
        else:
            left = leftover(weights[n], laws[n], draft.probs[n], tokens[n])
            missing = float(left.sum()) + 1.0 - weights[n]
            kept = float(left.sum()) / missing if missing > 0 else 1.0
        if n == 0 or chain.uniform() < kept:
            total = left.sum()
            law = Distribution(laws[n].ids, left / total) if total > 0 else laws[n]
            return Verdict(n, chain.draw(law, tokens[:n]))
    raise AssertionError


def leftover(
    weight: float, p: Distribution, q: Distribution | None, token: int
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The positive part of `weight` p - q over the ids of p; `q` None is certain of `token`."""
    left = weight * p.probs
    for i, id_ in enumerate(p.ids.tolist()):
        left[i] -= float(id_ == token) if q is None else probability(q, id_)
    return np.maximum(left, 0.0)


def expected(p: Distribution, q: Distribution) -> tuple[float, float, float]:
    """The probability that a draft from q is kept: `residual`, `greedy`, `seed`.

    Gumbel noise gives both laws the token i with probability 1 / sum_j max(p_j / p_i, q_j / q_i);
    by falling p / q, the first of the two is larger up to i, and the second behind it.
    """
    ids = np.union1d(p.ids, q.ids)
    both = np.zeros((2, len(ids)))
    for row, law in zip(both, (p, q), strict=True):
        row[ids.searchsorted(law.ids)] = law.probs
    a, b = both[:, (-both[0] / np.maximum(both[1], 1e-300)).argsort()]
    upto, behind = a.cumsum(), b.sum() - b.cumsum()
    shared = (a > 0) & (b > 0)
    seeded = 1 / (upto[shared] / a[shared] + behind[shared] / b[shared])
    return float(np.minimum(a, b).sum()), float(both[0, both[1].argmax()]), float(seeded.sum())


class RecordedRows:
    """Collects `expected` of every draft's first token while `verify` judges."""

    def __init__(self, verify: Verify) -> None:
        self._verify = verify
        self.seen: list[tuple[float, float, float]] = []

    def __call__(
        self, draft: Draft, target: Callable[[int], Distribution], chain: SamplingChain
    ) -> Verdict:
        if draft.tokens:
            q = draft.probs[0] or Distribution(np.array(draft.tokens[:1]), CERTAIN)
            self.seen.append(expected(target(0), q))
        return self._verify(draft, target, chain)

    def line(self, label: str) -> str:
        """The means, and by how much `greedy` and `seed` differ from `residual`."""
        seen = np.array(self.seen)
        mean, diff = seen.mean(0), seen[:, 1:] - seen[:, :1]
        error = diff.std(0) / math.sqrt(len(diff))
        return (
            f"{label}  residual {mean[0]:.4f}, greedy {mean[1]:.4f} ({diff[:, 0].mean():+.4f} +- "
            f"{error[0]:.4f}), seed {mean[2]:.4f} ({diff[:, 1].mean():+.4f} +- {error[1]:.4f})"
        )


class DraftingMethod(NamedTuple):
    name: str
    is_seeded: bool
    drafts_greedily: bool
    verify: Verify


WAYS = (
    DraftingMethod("residual", False, False, verify),
    DraftingMethod("block", False, False, verify_block),
    DraftingMethod("greedy", False, True, verify),
    DraftingMethod("seed", True, False, verify),
    DraftingMethod("seed, greedy", True, True, verify),
)


class Result(NamedTuple):
    """`judged` and `accepted` per position; `per_round` holds each prompt's tokens per round."""

    judged: list[int]
    accepted: list[int]
    per_round: list[float]
    rows: RecordedRows

    def line(self, label: str) -> str:
        rates = [a / j for a, j in zip(self.accepted, self.judged, strict=True) if j]
        mean = statistics.fmean(self.per_round)
        error = statistics.stdev(self.per_round) / math.sqrt(len(self.per_round))
        shown = " ".join(f"{r:.3f}" for r in rates)
        return f"{label}  {shown:23}  {mean:.3f} +- {error:.3f}"


def chains(way: DraftingMethod) -> Callable[..., SamplingChain]:
    """What makes a request's chain: with random numbers that are the same on every run."""
    numbers = iter(range(1 << 30))

    def make(
        params: SamplingParams, prompt: Sequence[int] = (), constraint: Constraint | None = None
    ) -> SamplingChain:
        chain = SamplingChain(params, prompt, constraint, np.random.default_rng(next(numbers)))
        chain._filters.draws_drafts = not way.drafts_greedily
        return chain

    return make


def measured(session: Session, way: DraftingMethod, params: Sequence[SamplingParams]) -> Result:
    """Answers to every held-out prompt, one under each of `params`."""
    text = (Path(__file__).parent / "prompts" / "held_out.json").read_text(encoding="utf-8")
    rows = RecordedRows(way.verify)
    per_round, sums = [], Stats()
    with patch.object(request, "verify", rows), patch.object(request, "SamplingChain", chains(way)):
        for prompt in json.loads(text):
            asked = session.chat_tokens([{"role": "user", "content": prompt}])
            total = Stats()
            for one in params:
                for chunk in session.engine.generate([asked], one, N_TOKENS):
                    if chunk.stats:
                        total += chunk.stats
            per_round.append(total.tokens_per_round)
            sums += total
    return Result(sums.judged_per_position, sums.accepted_per_position, per_round, rows)


def measure(
    depths: Sequence[int], temps: Sequence[float], is_open: bool, n_rounds: int
) -> Iterator[str]:
    """The lines of the table, as they are measured."""
    for depth in depths:
        options = LoadOptions(n_ctx=512, n_threads=1, draft_min=depth, draft_max=depth)
        with load(demo_model(kind="q8_0"), options) as session:
            for temperature in temps:
                law = SamplingParams(temperature)
                if is_open:
                    law = SamplingParams(temperature, 0, 1.0, 0.0)
                label = f"{depth:5}  {temperature:11}"
                for way in WAYS:
                    seeds = range(n_rounds) if way.is_seeded else [None] * n_rounds
                    wishes = [dataclasses.replace(law, seed=s) for s in seeds]
                    result = measured(session, way, wishes)
                    yield result.line(f"{label}  {way.name:12}")
                    if way is WAYS[0]:
                        first = result.rows
                yield first.line(f"{label}  expected    ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depths", default="1,2,3")
    parser.add_argument("--temps", default="0.3,0.7,1")
    parser.add_argument(
        "--open", action="store_true", help="Sample the whole vocabulary, without filters."
    )
    parser.add_argument("--rounds", type=int, default=4, help="Answers per prompt.")
    args = parser.parse_args()
    depths = [int(d) for d in args.depths.split(",")]
    temps = [float(t) for t in args.temps.split(",")]
    print("depth  temperature  variant       accepted by position     tokens per round")
    for line in measure(depths, temps, args.open, args.rounds):
        print(line, flush=True)


if __name__ == "__main__":
    main()
