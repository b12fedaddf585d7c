"""How much of a prompt to read at once, from how long the last piece took."""

from __future__ import annotations


class PrefillChunker:
    """How many prompt rows a decode may hold so that it takes about `CHUNK_S` seconds.

    Between two decodes requests can be cancelled and answers go on, so a chunk is what a long
    prompt can delay the others by. It is never cut below a floor: small chunks read all the weights
    for few rows, and with experts on the CPU they hardly take less time.
    """

    CHUNK_S = 1.0
    FIRST, FLOOR_ALONE, FLOOR = 64, 128, 32

    def __init__(self, n_batch: int) -> None:
        self._n_batch = n_batch
        self._n_rows = self.FIRST

    def n_rows(self, is_alone: bool) -> int:
        """The next chunk; `is_alone` when no answer is waiting for it."""
        floor = self.FLOOR_ALONE if is_alone and self._n_rows != self.FIRST else self.FLOOR
        return min(max(self._n_rows, floor), self._n_batch)

    def update(self, n_rows: int, seconds: float) -> None:
        """A decode with `n_rows` prompt rows took `seconds`."""
        if n_rows >= min(self.FLOOR, self._n_rows):
            fitting = int(n_rows * self.CHUNK_S / max(seconds, 1e-6))
            self._n_rows = max(min(fitting, 2 * self._n_rows), 1)
