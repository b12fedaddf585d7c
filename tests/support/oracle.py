"""A drafter that knows what is to come, and is wrong at times: for models that cannot guess."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gguf_mtp.types import Ask, Draft, Rows


class Oracle:
    """Drafts what is known to come, one token in four wrong; a `types.Drafter` that keeps
    nothing."""

    name, is_free = "oracle", False

    def __init__(self, known: Sequence[Sequence[int]]) -> None:
        self.known = [list(text) for text in known]
        self._rng = np.random.default_rng(1)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return [self._draft(list(ask.tokens), ask.limit.n) for ask in asks]

    def _draft(self, tokens: list[int], n: int) -> Draft:
        text = next((t for t in self.known if t[: len(tokens)] == tokens), [])
        n = min(n, int(self._rng.integers(0, n + 1)) if self._rng.random() < 0.5 else n)
        right = text[len(tokens) : len(tokens) + n]
        wrong = self._rng.random(len(right)) < 0.25
        drafted = [(t + 1) % 300 if w else t for t, w in zip(right, wrong, strict=True)]
        return Draft(drafted, [None] * len(drafted), [1.0] * len(drafted), self.name)

    def observe(self, rows: Sequence[Rows]) -> None: ...
    def rewind(self, seq: int, n: int) -> None: ...
    def copy(self, src: int, dst: int, n: int) -> None: ...
    def save(self, _: int) -> bytes:
        return b""

    def load(self, seq: int, data: bytes) -> None: ...
