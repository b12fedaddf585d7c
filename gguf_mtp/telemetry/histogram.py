"""Counts of values by size, as Prometheus wants them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

__all__ = ["DEPTHS", "SECONDS", "Histogram"]

SECONDS = tuple(m * 10**e for e in range(-4, 3) for m in (1.0, 2.5, 5.0))
"""From a tenth of a millisecond, a demo model's round, to minutes, a long prompt's reading."""
DEPTHS = (*map(float, range(9)), 12.0, 16.0, 32.0, 64.0)


class Histogram:
    """How many values were at most as large as each of `bounds`, which ascend."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0  # of all values

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Each bound as text, infinity last, with how many values were no larger."""
        names = [*(f"{bound:g}" for bound in self._bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self._counts)), strict=True))
