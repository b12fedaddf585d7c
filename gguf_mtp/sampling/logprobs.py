"""How likely the target found the tokens of an answer, whatever the sampling chain made of it.

Log-probabilities are those of the raw logits, as llama-server and OpenAI report them: no penalty,
filter or temperature is in them. Pure numpy.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gguf_mtp.types import TokenLogprobs


def logprobs_of(logits: NDArray[np.float32], token: int, n_top: int) -> TokenLogprobs:
    """`token`'s entry, and `n_top` likeliest ids. `logits`: float32 [n_vocab]."""
    peak = logits.max()
    log_total = float(peak) + float(np.log(np.exp(logits - peak).sum(dtype=np.float64)))
    return TokenLogprobs(
        token,
        float(logits[token]) - log_total,
        [(int(i), float(logits[i]) - log_total) for i in _largest(logits, n_top)],
    )


def _largest(logits: NDArray[np.float32], n: int) -> NDArray[np.int64]:
    """The ids of the `n` largest logits, falling; equal ones by rising id."""
    if n == 0:
        return np.empty(0, np.int64)
    n = min(n, len(logits))
    bound = np.partition(logits, len(logits) - n)[len(logits) - n]
    ids: NDArray[np.int64] = (logits >= bound).nonzero()[0]
    order: NDArray[np.int64] = (-logits[ids]).argsort(kind="stable")[:n]
    return ids[order]
