"""Random numbers that are looked up, not drawn: one for each (seed, position, token).

So whoever asks, in whatever order, gets the same number: a draft and the target that judges it, a
run with drafting and one without. The generator is SplitMix64 (Steele et al., "Fast splittable
pseudorandom number generators", 2014), whose n-th output is a function of its start and n.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ALL = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def uniforms(seed: int, position: int, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number strictly between 0 and 1 for each of `ids`. `seed` counts modulo 2^64."""
    start = _mixed(_mixed(seed) + position * _STEP)
    z = ids.astype(np.uint64) * np.uint64(_STEP) + np.uint64(start)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_FIRST)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_SECOND)
    z ^= z >> np.uint64(31)
    top: NDArray[np.float64] = (z >> np.uint64(11)).astype(np.float64)  # 53 bits
    return (top + 0.5) * 2.0**-53


def _mixed(x: int) -> int:
    """SplitMix64's output function of one state."""
    z = (x + _STEP) & _ALL
    z = (z ^ z >> 30) * _FIRST & _ALL
    z = (z ^ z >> 27) * _SECOND & _ALL
    return z ^ z >> 31
