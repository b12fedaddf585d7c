"""Are the hidden rows that a target puts out the model's own?

Where llama.cpp gives their memory to something else, texts stay right and no draft of an MTP block
is accepted, without a word. So when a block is to draft two rows are decoded twice: once with
logits, which is when that happens, and once without.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from gguf_mtp.types import Decoder, Floats, Rows

__all__ = ["check_hidden_rows"]

log = logging.getLogger(__name__)

TOLERANCE = 0.05
"""Of the largest value: devices may sum in another order the second time."""
_TOKENS = [0, 1]


def check_hidden_rows(target: Decoder, path: str) -> None:
    """Warns when they are not. The target's first sequence must be empty, and is so again.

    They are decoded in a thread of their own, which ends: OpenMP keeps helpers for every thread
    that ever decoded, and where they and those of another thread (a server's) outnumber the cores,
    libgomp hardly spins any more. A small model then took 8 times as long.
    """
    with ThreadPoolExecutor(1) as aside:
        with_logits, without = aside.submit(_twice, target).result()
    largest = float(np.abs(without).max())
    if float(np.abs(with_logits - without).max()) > TOLERANCE * largest:
        log.warning(
            "the hidden rows of %s are not the model's, so its MTP block will hardly draft: "
            "llama.cpp gives their memory to something else; --draft ngram or off is faster",
            path,
        )


def _twice(target: Decoder) -> tuple[Floats, Floats]:
    return _hidden(target, len(_TOKENS)), _hidden(target, 0)


def _hidden(target: Decoder, n_outputs: int) -> Floats:
    found = target.decode([Rows(0, 0, _TOKENS, n_outputs)]).outputs[0].hidden
    assert found is not None
    rows: Floats = found.copy()
    target.rewind(0, 0)
    return rows
