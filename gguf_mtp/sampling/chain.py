"""The sampling chain of one sequence: logits to distributions, and draws from them.

A grammar's mask comes first, then biases, then the samplers in the order that was asked for. It
knows nothing of models or text, and of drafts only which tokens stand before a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from gguf_mtp.errors import BadLogits
from gguf_mtp.params import Constraint, SamplingParams
from gguf_mtp.sampling.filters import CERTAIN, Filters
from gguf_mtp.sampling.noise import uniforms
from gguf_mtp.sampling.penalties import Seen, TokenHistory, penalised
from gguf_mtp.sampling.rows import Row
from gguf_mtp.types import Distribution, Floats


class SamplingChain:
    """A `types.Chain`: the parameters of one sequence, what it has seen, and its random numbers.

    With a seed, every draw looks its numbers up by (seed, position, token): the token is argmax(log
    p + Gumbel noise), a function of the distribution and the place alone, and the text does not
    depend on what was drafted. A draft that is drawn shares the numbers with the target
    (drafter-invariant speculative decoding, arXiv 2408.07978). Without a seed, draws take numbers
    from `rng` as they come. `is_coupled`: the same distribution at the same place gives the same
    token.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int] = (),
        constraint: Constraint | None = None,
        rng: np.random.Generator | None = None,
    ) -> None:
        self.params = params
        self._filters = Filters(params)
        self._memory = TokenHistory(params, prompt)
        self._constraint = constraint
        self._n = len(prompt)
        self._rng = rng or np.random.Generator(np.random.PCG64())
        self.is_greedy = self._filters.is_greedy
        self.is_coupled = self.is_greedy or params.seed is not None
        changes = self._filters.changes_rows or self._filters.counts_late or params.logit_bias
        self._is_plain = constraint is None and not changes
        self._is_argmax = self._is_plain and self._filters.takes_the_top

    def target_probs(self, logits: Floats, after: Sequence[int] = ()) -> Distribution:
        """The distribution of the token behind `after`. `logits`: float32 [n_vocab].

        Raises `BadLogits` for a row with a NaN or +inf, or of nothing but -inf: its maximum shows
        each of them.
        """
        if self._is_argmax:
            top = logits.argmax(0, keepdims=True)
            self._check(float(logits[top[0]]), after)
            return Distribution(top, CERTAIN)
        row, seen = self._row(logits, after)
        self._check(row.peak, after)
        return self._filters.distribution(row, seen)

    def _check(self, peak: float, after: Sequence[int]) -> None:
        if not math.isfinite(peak):
            raise BadLogits(self._n + len(after), peak)

    def draft_probs(self, logits: Floats, after: Sequence[int] = ()) -> tuple[Distribution, float]:
        """What a drafter draws from, and its confidence in one pass over the row.

        Mostly the likeliest token alone (`Filters.draws_drafts`). Confidence is the largest
        probability among the tokens near the top: what the rest would add to the sum is left out,
        for it is a measure to be calibrated, not a distribution. It is 0 where the logits are no
        numbers.
        """
        row, seen = self._row(logits, after)
        if not math.isfinite(row.peak):
            return Distribution(np.zeros(1, np.int64), CERTAIN), 0.0
        ids, values = row.top()
        sure = float(1 / np.exp(values - values.max()).sum(dtype=np.float64))
        if self._filters.draws_drafts:
            return self._filters.distribution(row, seen), sure
        return Distribution(ids[values.argmax()][None], CERTAIN), sure

    def draw(self, dist: Distribution, after: Sequence[int] = ()) -> int:
        """One token drawn from `dist`, to stand behind `after`."""
        if len(dist.ids) == 1:
            return int(dist.ids[0])
        if self.params.seed is not None:
            noise = uniforms(self.params.seed, self._n + len(after), dist.ids)
            with np.errstate(divide="ignore"):  # a probability may be 0 after a low temperature
                return int(dist.ids[(np.log(noise) / dist.probs).argmax()])
        at = dist.probs.cumsum().searchsorted(self.uniform(), side="right")
        return int(dist.ids[min(int(at), len(dist.ids) - 1)])  # the sum may end just below 1

    def commit(self, tokens: Sequence[int]) -> None:
        """These have joined the answer."""
        self._n += len(tokens)
        if self._is_plain:
            return
        self._memory.commit(tokens)
        if self._constraint:
            self._constraint.commit(tokens)

    def uniform(self) -> float:
        """A number in [0, 1) that was not looked up."""
        return float(self._rng.random())

    def _row(self, logits: Floats, after: Sequence[int]) -> tuple[Row, Seen | None]:
        """The row with its mask, biases and penalties; and what later penalties count."""
        if self._is_plain:
            return Row(logits), None
        mask = self._constraint.allowed(after) if self._constraint else None
        seen = self._memory.seen(after)
        n_known = int(seen.ids.searchsorted(len(logits)))  # a bias may name a token there is not
        ids, counts = seen.ids[:n_known], seen.counts[:n_known]
        if not n_known:
            return Row(logits, mask), seen
        values = logits[ids] + seen.bias[:n_known]
        if self._filters.changes_rows:
            values = penalised(values, counts, self.params)
        return Row(logits, mask, ids, values), seen
