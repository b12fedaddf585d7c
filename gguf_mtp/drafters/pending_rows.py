"""Rows that a target has decoded and a drafter has not: what one sequence has buffered."""

from __future__ import annotations

import numpy as np

from gguf_mtp.errors import SavedStateError
from gguf_mtp.types import Floats, Rows

__all__ = ["PendingRows"]


class PendingRows:
    """Hidden rows of the target that the drafter has not decoded yet, the first one of row `first`.

    `tokens[i]` stands at position `first + i`. What became of the rows before `first` is the
    drafter's cache's business.
    """

    def __init__(self) -> None:
        self.first = 0
        self.tokens: list[int] = []
        self.hidden: list[Floats] = []
        self.newest: tuple[int, Floats] | None = None  # token and hidden row of `first - 1`

    @property
    def end(self) -> int:
        """The position of the next row to observe."""
        return self.first + len(self.tokens)

    def observe(self, rows: Rows) -> None:
        """The hidden rows are copied."""
        assert rows.hidden is not None
        assert rows.pos == self.end, f"row {rows.pos} observed, row {self.end} expected"
        self.tokens += rows.tokens
        self.hidden.append(rows.hidden.copy())

    def rows(self, n: int) -> Floats:
        """The first `n` hidden rows, float32 [n, width]."""
        if len(self.hidden) > 1:
            self.hidden = [np.concatenate(self.hidden)]
        return self.hidden[0][:n]

    def drop(self, n: int) -> None:
        """The first `n` rows are in the cache now."""
        rows = self.rows(n)
        self.newest = (self.tokens[n - 1], rows[n - 1 :])
        left = self.hidden[0][n:]
        self.first, self.tokens = self.first + n, self.tokens[n:]
        self.hidden = [left] if len(left) else []

    def keep(self, n: int) -> None:
        """Rows from the n-th on never were."""
        self.hidden = [self.rows(n)] if n else []
        del self.tokens[n:]

    def restart(self, first: int) -> None:
        """Nothing is buffered, and the next row to observe is `first`."""
        self.first, self.tokens, self.hidden, self.newest = first, [], [], None

    def put_back(self) -> None:
        """The newest row leaves the cache to be decoded again, if it is still known."""
        if not self.tokens and self.newest:
            self.first -= 1
            self.tokens, self.hidden, self.newest = [self.newest[0]], [self.newest[1]], None

    def become(self, other: PendingRows) -> None:
        """The same as another sequence has."""
        self.first, self.tokens = other.first, list(other.tokens)
        self.hidden, self.newest = list(other.hidden), other.newest

    def pack(self, cache: bytes) -> bytes:
        """The rows, and the bytes of the drafter's cache with them."""
        tokens = np.array([self.first, *self.tokens], "<i8").tobytes()
        hidden = self.rows(len(self.tokens)) if self.tokens else np.empty((0, 0))
        parts = (tokens, hidden.astype("<f4").tobytes(), cache)
        return b"".join(len(p).to_bytes(8, "little") + p for p in parts)

    @classmethod
    def unpack(cls, data: bytes) -> tuple[PendingRows, bytes]:
        """What `pack` was given. Raises `SavedStateError`."""
        parts = []
        while data:
            end = 8 + int.from_bytes(data[:8], "little")
            parts.append(data[8:end])
            data = data[end:]
        found = cls()
        try:
            found.first, *found.tokens = np.frombuffer(parts[0], "<i8").tolist()
            hidden = np.frombuffer(parts[1], "<f4").astype(np.float32)
            if found.tokens:
                found.hidden = [hidden.reshape(len(found.tokens), -1)]
            return found, parts[2]
        except (IndexError, ValueError):
            raise SavedStateError("the saved rows are not as gguf-mtp writes them") from None
