"""What changes single logits before anything is filtered: biases, and penalties for repetition.

Few entries of a row are touched, so they are listed (ids and new logits) and the row stays as it
is. The formulas are llama.cpp's (`llama_sampler_penalties_apply`); the penalties count the last
`repeat_last_n` tokens of prompt, answer and draft, as llama-server's do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gguf_mtp.params import SamplingParams
from gguf_mtp.types import Floats


class Seen(NamedTuple):
    """`ids`, int64 [n], rising, came `counts`, float32 [n], times; `bias`, float32 [n], is added
    to their logits. A token may have a bias and a count of 0."""

    ids: NDArray[np.int64]
    counts: Floats
    bias: Floats


def is_penalising(params: SamplingParams) -> bool:
    """Whether any penalty is on."""
    return params.repeat_last_n != 0 and (
        params.repeat_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
    )


class TokenHistory:
    """What one sequence's biases and penalties depend on: the last tokens, and how often they came.

    Without a penalty it remembers nothing.
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int]) -> None:
        self._bias: dict[int, float] = {}
        for token, bias in params.logit_bias:
            self._bias[token] = self._bias.get(token, 0.0) + bias
        self._n = params.repeat_last_n if is_penalising(params) else 0
        self._window: list[int] = []
        self._counts: Counter[int] = Counter()
        self._known: dict[tuple[int, ...], Seen] = {}
        self.commit(prompt)

    def commit(self, tokens: Sequence[int]) -> None:
        """These follow what is remembered."""
        if self._n == 0:
            return
        self._known.clear()
        self._window += tokens
        self._counts.update(tokens)
        n_over = len(self._window) - self._n if self._n > 0 else 0
        if n_over > 0:
            _forget(self._counts, self._window[:n_over])
            del self._window[:n_over]

    def seen(self, after: Sequence[int]) -> Seen:
        """Every token with a bias or a count, `after` following what is committed.

        Computed once for a draft position: the draft asks for it, and so does the target.
        """
        key = tuple(after) if self._n else ()
        seen = self._known.get(key)
        if seen is None:
            seen = self._known[key] = self._count(key)
        return seen

    def _count(self, after: tuple[int, ...]) -> Seen:
        counts = self._counts.copy()
        if after:
            counts.update(after)
            n_over = len(self._window) + len(after) - self._n if self._n > 0 else 0
            if n_over > 0:
                _forget(counts, [*self._window, *after][:n_over])
        ids = np.array(sorted(counts.keys() | self._bias.keys()), np.int64)
        return Seen(
            ids,
            np.array([counts.get(i, 0) for i in ids.tolist()], np.float32),
            np.array([self._bias.get(i, 0.0) for i in ids.tolist()], np.float32),
        )


def penalised(logits: Floats, counts: Floats, params: SamplingParams) -> Floats:
    """`logits` of tokens that came `counts` times. Both float32 [n]."""
    factor = np.float32(params.repeat_penalty)
    changed = np.where(logits <= 0, logits * factor, logits / factor)
    changed -= counts * np.float32(params.frequency_penalty)
    changed -= np.float32(params.presence_penalty)
    return np.where(counts > 0, changed, logits)


def _forget(counts: Counter[int], tokens: Sequence[int]) -> None:
    for token in tokens:
        counts[token] -= 1
        if not counts[token]:
            del counts[token]
