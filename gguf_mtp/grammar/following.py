"""Constraints on an answer that know no grammar: when one begins, and when an answer may end.

Tokens in, masks out; they know neither logits nor drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gguf_mtp.params import Constraint

__all__ = ["AfterReasoning", "Fallible", "Following", "Mask", "MayReason", "MinTokens"]

Mask = NDArray[np.bool_]

MAX_LEAD = 2
"""Tokens of white space between reasoning and the text that is bound."""


class Following(Constraint, Protocol):
    """A constraint that says, once it had to give up, why; the answer is worthless then."""

    @property
    def failure(self) -> str | None: ...


class Fallible(Following, Protocol):
    """Knows what may come at any time, and can be told to give up (`grammar.Follower`)."""

    def allowed(self, after: Sequence[int]) -> Mask: ...
    def fail(self, reason: str) -> None: ...


class MinTokens:
    """A `params.Constraint`: none of `ends` before `n` tokens have come; `n_vocab` is how many the
    vocabulary has. It never fails."""

    failure: str | None = None

    def __init__(self, n: int, ends: Iterable[int], n_vocab: int) -> None:
        self._n_left = n
        self._others = np.ones(n_vocab, np.bool_)
        self._others[list(ends)] = False

    def allowed(self, after: Sequence[int]) -> NDArray[np.bool_] | None:
        return self._others if len(after) < self._n_left else None

    def commit(self, tokens: Sequence[int]) -> None:
        self._n_left -= len(tokens)


class AfterReasoning:
    """A `params.Constraint` that allows everything until `close` has come, then what `inner` does.

    Before the grammar's text there may be white space, as models write it behind their reasoning.
    """

    def __init__(
        self, inner: Fallible, blanks: Mask, close: bytes, piece: Callable[[int], bytes]
    ) -> None:
        self._inner, self._blanks = inner, blanks
        self._close, self._piece = close, piece
        self._tail = b""  # of the reasoning, too short to hold `close`
        self._is_closed = False
        self._n_lead = 0  # tokens of white space behind `close`
        self._is_inside = False  # the grammar's text

    @property
    def failure(self) -> str | None:
        return self._inner.failure

    def allowed(self, after: Sequence[int]) -> Mask | None:
        at = self._closed_at(after)
        if at is None:
            return None
        n_lead, at = self._skip_lead(after, at)
        mask = self._inner.allowed(after[at:])
        if at < len(after) or n_lead >= MAX_LEAD or self._is_inside:
            return mask
        return mask | self._blanks

    def commit(self, tokens: Sequence[int]) -> None:
        at = self._closed_at(tokens)
        if at is None:
            self._tail = self._text(tokens)[1 - len(self._close) :]
            return
        if not self._is_closed:
            self._is_closed = True
            if self._text(tokens[:at]).partition(self._close)[2].strip():
                self._inner.fail("the token that ends the reasoning holds text behind it")
        self._n_lead, at = self._skip_lead(tokens, at)
        if at < len(tokens):
            self._is_inside = True
            self._inner.commit(tokens[at:])

    def _closed_at(self, tokens: Sequence[int]) -> int | None:
        """How many of `tokens` belong to the reasoning and its end; None when it goes on."""
        if self._is_closed:
            return 0
        text = self._tail
        for i, token in enumerate(tokens):
            text += self._piece(token)
            if self._close in text:
                return i + 1
        return None

    def _skip_lead(self, tokens: Sequence[int], at: int) -> tuple[int, int]:
        """How many tokens of white space have come before the grammar's text, and where in `tokens`
        that begins."""
        n_lead = self._n_lead
        if self._is_inside:
            return n_lead, at
        while at < len(tokens) and n_lead < MAX_LEAD and self._is_lead(tokens[at]):
            n_lead, at = n_lead + 1, at + 1
        return n_lead, at

    def _is_lead(self, token: int) -> bool:
        """White space, unless the grammar's own text may begin with it."""
        return bool(self._blanks[token]) and not self._inner.allowed(())[token]

    def _text(self, tokens: Sequence[int]) -> bytes:
        return self._tail + b"".join(map(self._piece, tokens))


class MayReason:
    """A `params.Constraint`: `inner` from the first token on, unless that is `opening`: then what
    `behind` makes of the rest, which begins inside the reasoning and is bound by the same `inner`.
    """

    def __init__(self, inner: Fallible, behind: AfterReasoning, opening: int) -> None:
        self._inner, self._behind, self._opening = inner, behind, opening
        self._chosen: Following | None = None

    @property
    def failure(self) -> str | None:
        return self._inner.failure

    def allowed(self, after: Sequence[int]) -> Mask | None:
        chosen, rest = self._choose(after)
        if chosen is not None:
            return chosen.allowed(rest)
        mask: Mask = self._inner.allowed(()).copy()
        mask[self._opening] = True
        return mask

    def commit(self, tokens: Sequence[int]) -> None:
        self._chosen, rest = self._choose(tokens)
        if self._chosen is not None:
            self._chosen.commit(rest)

    def _choose(self, tokens: Sequence[int]) -> tuple[Following | None, Sequence[int]]:
        """Who is asked about `tokens`, and about which of them; nobody before the first one."""
        if self._chosen is not None or not tokens:
            return self._chosen, tokens
        if tokens[0] == self._opening:
            return self._behind, tokens[1:]
        return self._inner, tokens
