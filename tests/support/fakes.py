"""Decoders without a model: they answer from the tokens alone and check every call.

`FakeTarget` computes logits from a sequence's last two tokens and marks each hidden row with its
position and token. `FakeMtp` checks that every row it is given pairs a token with the hidden row
before it, keeps no hidden row once decoded, and guesses like the target where `skill` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gguf_mtp.errors import CannotRewind, DecodeError, SavedStateError
from gguf_mtp.types import Floats, Output, Rows, Step

N_VOCAB = 12
N_EMBD = 3


def logits_after(tokens: Sequence[int], sharpness: float = 2.0) -> Floats:
    """A fixed, uneven law over N_VOCAB tokens that depends on the last two tokens."""
    a, b = ([0, 0, *tokens])[-2:]
    rng = np.random.default_rng(1000 * a + b)
    return (sharpness * rng.standard_normal(N_VOCAB)).astype(np.float32)


def hidden_row(seq_tokens: Sequence[int], pos: int) -> Floats:
    """What the target computes at `pos`: enough to know which prefix it stands for."""
    return np.array([pos, seq_tokens[pos], hash(tuple(seq_tokens[: pos + 1])) % 9973], np.float32)


class FakeTarget:
    """A `Decoder` over N_VOCAB tokens. `fail_at` decodes (counted from 1) raise DecodeError.

    With `n_kept` it has states as recurrent layers have: of a sequence's last draft up to so many
    rows can be dropped, once and before the next decode; a failed decode costs its sequences."""

    def __init__(
        self,
        n_seq: int = 1,
        *,
        n_batch: int = 512,
        law: Callable[[Sequence[int]], Floats] = logits_after,
        can_rewind: bool = True,
        fail_at: frozenset[int] = frozenset(),
        n_kept: int | None = None,
    ) -> None:
        self.cache: list[list[int]] = [[] for _ in range(n_seq)]
        self.batches: list[list[Rows]] = []
        self.refuses = False
        self._n_kept, self._droppable = n_kept, [0] * n_seq
        self._law, self._n_batch = law, n_batch
        self._can_rewind, self._fail_at = can_rewind, fail_at

    def n_past(self, seq: int) -> int:
        return len(self.cache[seq])

    def decode(self, rows: Sequence[Rows]) -> Step:
        self.batches.append(list(rows))
        assert len({r.seq for r in rows}) == len(rows), "a sequence came twice"
        assert sum(len(r.tokens) for r in rows) <= self._n_batch
        if len(self.batches) in self._fail_at:
            if self._n_kept is None:
                raise DecodeError(1, "decoding failed")
            for r in rows:
                self.cache[r.seq] = []
            raise DecodeError(-3, "decoding failed")
        self._droppable = [0] * len(self.cache)
        for r in rows:
            self._droppable[r.seq] = min(self._n_kept or 0, r.n_outputs - 1)
        return Step([self._rows(r) for r in rows], 0.001)

    def _rows(self, r: Rows) -> Output:
        assert r.pos == self.n_past(r.seq), (r.pos, self.n_past(r.seq))
        cache = self.cache[r.seq]
        logits, hidden = [], []
        for token in r.tokens:
            cache.append(token)
            logits.append(self._law(cache))
            hidden.append(hidden_row(cache, len(cache) - 1))
        first = len(r.tokens) - r.n_outputs
        return Output(np.array(logits[first:], np.float32), np.array(hidden, np.float32))

    def rewind(self, seq: int, n_past: int) -> None:
        if 0 < n_past < self.n_past(seq) and not self._can_rewind:
            raise CannotRewind("recurrent")
        n_dropped = self.n_past(seq) - n_past
        if self._n_kept is not None and n_past and n_dropped > 0:
            if n_dropped > self._droppable[seq]:
                raise CannotRewind("not kept")
            self._droppable[seq] = 0
        del self.cache[seq][n_past:]

    def copy(self, src: int, dst: int, n_past: int) -> None:
        if self._n_kept is not None and n_past < self.n_past(src):
            raise CannotRewind("not kept")
        self.cache[dst] = self.cache[src][:n_past]

    def save(self, seq: int) -> bytes:
        return bytes(self.cache[seq])

    def load(self, seq: int, data: bytes) -> int:
        if self.refuses:
            raise SavedStateError("refused")
        self.cache[seq] = list(data)
        return len(data)


class FakeMtp:
    """A `Decoder` that plays the MTP block of `FakeTarget`; its row p is (hidden p - 1, token p).

    It draws from the target's law for two tokens on where `skill(tokens)` is true, and from another
    one elsewhere. Certain rows are recognised by their hidden row; a chained row carries the fake's
    own mark, -1.
    """

    def __init__(
        self,
        n_seq: int = 1,
        *,
        n_batch: int = 512,
        skill: Callable[[Sequence[int]], bool] = lambda tokens: sum(tokens) % 3 > 0,
        fail_at: frozenset[int] = frozenset(),
    ) -> None:
        self.cache: list[list[int]] = [[] for _ in range(n_seq)]  # position 0 is never decoded
        self.batches: list[list[Rows]] = []
        self.refuses = False
        self._skill, self._n_batch, self._fail_at = skill, n_batch, fail_at

    def n_past(self, seq: int) -> int:
        return len(self.cache[seq])

    def decode(self, rows: Sequence[Rows]) -> Step:
        self.batches.append(list(rows))
        assert sum(len(r.tokens) for r in rows) <= self._n_batch
        if len(self.batches) in self._fail_at:
            raise DecodeError(-3, "decoding failed")
        return Step([self._rows(r) for r in rows], 0.001)

    def _rows(self, r: Rows) -> Output:
        cache = self.cache[r.seq]
        if not cache:
            assert r.pos == 1
            assert r.hidden is not None
            cache.append(int(r.hidden[0, 1]))  # token 0 is known from its hidden row only
        assert r.pos == len(cache), (r.pos, len(cache))
        assert r.hidden is not None
        assert r.hidden.shape == (len(r.tokens), N_EMBD)
        logits = []
        for token, hidden in zip(r.tokens, r.hidden, strict=True):
            if hidden[0] >= 0:
                assert (hidden == hidden_row(cache, len(cache) - 1)).all(), "the wrong hidden row"
            cache.append(token)
            shift = 0 if self._skill(cache) else 1
            logits.append(np.roll(logits_after(cache), shift))
        first = len(r.tokens) - r.n_outputs
        chained = np.full((len(r.tokens), N_EMBD), -1, np.float32)
        return Output(np.array(logits[first:], np.float32), chained)

    def rewind(self, seq: int, n_past: int) -> None:
        del self.cache[seq][n_past:]

    def copy(self, src: int, dst: int, n_past: int) -> None:
        self.cache[dst] = self.cache[src][:n_past]

    def save(self, seq: int) -> bytes:
        return bytes(self.cache[seq])

    def load(self, seq: int, data: bytes) -> int:
        if self.refuses:
            raise SavedStateError("refused")
        self.cache[seq] = list(data)
        return len(data)


class FakeBlocks(FakeTarget):
    """A `Decoder` that plays DSpark's stages beside `FakeTarget`: rows with `hidden` are certain
    ones, which must follow the cache; rows without are a block of `MASK`s behind a certain token.

    It goes on from its own likeliest tokens, by the target's law where `skill(tokens)` is true.
    """

    MASK = N_VOCAB + 1

    def __init__(
        self,
        n_seq: int = 1,
        *,
        n_batch: int = 512,
        skill: Callable[[Sequence[int]], bool] = lambda tokens: sum(tokens) % 3 > 0,
        fail_at: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(n_seq, n_batch=n_batch, fail_at=fail_at)
        self._skill = skill

    def decode(self, rows: Sequence[Rows]) -> Step:
        assert len({r.hidden is None for r in rows}) == 1, "two kinds of rows in a batch"
        assert rows[0].hidden is not None or len({len(r.tokens) for r in rows}) == 1
        return super().decode(rows)

    def _rows(self, r: Rows) -> Output:
        assert r.pos == self.n_past(r.seq), (r.pos, self.n_past(r.seq))
        cache = self.cache[r.seq]
        if r.hidden is not None:
            assert r.n_outputs == 0
            for hidden in r.hidden:
                cache.append(int(hidden[1]))
                assert (hidden == hidden_row(cache, len(cache) - 1)).all(), "the wrong rows"
            return Output(np.empty((0, N_VOCAB), np.float32), None)
        assert r.n_outputs == len(r.tokens)
        assert list(r.tokens[1:]) == [self.MASK] * (len(r.tokens) - 1)
        text, logits, sure = [*cache, r.tokens[0]], [], []
        for _ in r.tokens:
            law = np.roll(logits_after(text), 0 if self._skill(text) else 1)
            logits.append(law)
            sure.append([(1 + sum(text) % 8) / 10, np.nan])
            text.append(int(law.argmax()))
        cache += r.tokens
        return Output(np.array(logits, np.float32), np.array(sure, np.float32))
