"""Constraints on an answer that know no grammar: when one begins, and when an answer may end.

A grammar may bind the text behind the reasoning, or begin with a token that opens what it is about,
as a tool call, and leave everything before it free.

Tokens in, masks out; they know neither logits nor drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gguf_mtp.params import Constraint

__all__ = [
    "AfterOptionalReasoning",
    "AfterReasoning",
    "Fallible",
    "GrammarState",
    "Mask",
    "MinTokens",
    "Reasoning",
    "TriggeredGrammar",
]

Mask = NDArray[np.bool_]

MAX_LEAD = 2
"""Tokens of white space between reasoning and the text that is bound."""


class GrammarState(Constraint, Protocol):
    """A constraint that says, once it had to give up, why; the answer is worthless then."""

    @property
    def failure(self) -> str | None: ...


class Fallible(GrammarState, Protocol):
    """Knows what may come at any time, and can be told to give up (`matching.GrammarMatcher`)."""

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


class Reasoning:
    """Where the reasoning ends that an answer begins with: behind the token with which its text has
    held `close`; `piece` gives a token's bytes."""

    def __init__(self, close: bytes, piece: Callable[[int], bytes]) -> None:
        self._close, self._piece = close, piece
        self._tail = b""  # of the reasoning, too short to hold `close`
        self.is_over = False

    def end(self, tokens: Sequence[int]) -> int | None:
        """How many of `tokens`, which follow the committed ones, belong to the reasoning and its
        end; None when it goes on."""
        if self.is_over:
            return 0
        text = self._tail
        for i, token in enumerate(tokens):
            text += self._piece(token)
            if self._close in text:
                return i + 1
        return None

    def commit(self, tokens: Sequence[int]) -> bytes:
        """The text behind the reasoning that the token which ends it holds too."""
        at = self.end(tokens)
        if self.is_over:
            return b""
        text = self._tail + b"".join(map(self._piece, tokens[:at]))
        self._tail, self.is_over = text[1 - len(self._close) :], at is not None
        return text.partition(self._close)[2]


class AfterReasoning:
    """A `params.Constraint` that allows everything until `reasoning` is over, then what `inner`
    does.

    Before the grammar's text there may be white space, as models write it behind their reasoning.
    """

    def __init__(self, inner: Fallible, blanks: Mask, reasoning: Reasoning) -> None:
        self._inner, self._blanks, self._reasoning = inner, blanks, reasoning
        self._n_lead = 0  # tokens of white space behind the reasoning
        self._is_inside = False  # the grammar's text

    @property
    def failure(self) -> str | None:
        return self._inner.failure

    def allowed(self, after: Sequence[int]) -> Mask | None:
        at = self._reasoning.end(after)
        if at is None:
            return None
        n_lead, at = self._skip_lead(after, at)
        mask = self._inner.allowed(after[at:])
        if at < len(after) or n_lead >= MAX_LEAD or self._is_inside:
            return mask
        return mask | self._blanks

    def commit(self, tokens: Sequence[int]) -> None:
        at = self._reasoning.end(tokens)
        if self._reasoning.commit(tokens).strip():
            self._inner.fail("the token that ends the reasoning also contains answer text")
        if at is None:
            return
        self._n_lead, at = self._skip_lead(tokens, at)
        if at < len(tokens):
            self._is_inside = True
            self._inner.commit(tokens[at:])

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


class TriggeredGrammar:
    """A `params.Constraint` that allows everything until one of `openings` comes, then what `inner`
    does, from that token on. What comes within `reasoning` opens nothing.

    It knows tokens: the same text in other tokens opens nothing either.
    """

    def __init__(
        self, inner: GrammarState, openings: frozenset[int], reasoning: Reasoning | None = None
    ) -> None:
        self._inner, self._openings, self._reasoning = inner, openings, reasoning
        self._is_open = False

    @property
    def failure(self) -> str | None:
        return self._inner.failure

    def allowed(self, after: Sequence[int]) -> Mask | None:
        at = self._opened_at(after)
        return None if at is None else self._inner.allowed(after[at:])

    def commit(self, tokens: Sequence[int]) -> None:
        at = self._opened_at(tokens)
        if self._reasoning:
            self._reasoning.commit(tokens)
        if at is not None:
            self._is_open = True
            self._inner.commit(tokens[at:])

    def _opened_at(self, tokens: Sequence[int]) -> int | None:
        """How many of `tokens` come before what `inner` knows; None when all do."""
        if self._is_open:
            return 0
        start = self._reasoning.end(tokens) if self._reasoning else 0
        if start is None:
            return None
        found = (i for i in range(start, len(tokens)) if tokens[i] in self._openings)
        return next(found, None)


class AfterOptionalReasoning:
    """A `params.Constraint`: `inner` from the first token on, unless that is `opening`: then what
    `behind` makes of the rest, which begins inside the reasoning and is bound by the same `inner`.
    """

    def __init__(self, inner: GrammarState, behind: GrammarState, opening: int) -> None:
        self._inner, self._behind, self._opening = inner, behind, opening
        self._chosen: GrammarState | None = None

    @property
    def failure(self) -> str | None:
        return self._inner.failure

    def allowed(self, after: Sequence[int]) -> Mask | None:
        chosen, rest = self._choose(after)
        if chosen is not None:
            return chosen.allowed(rest)
        mask = self._inner.allowed(())
        if mask is not None:
            mask = mask.copy()
            mask[self._opening] = True
        return mask

    def commit(self, tokens: Sequence[int]) -> None:
        self._chosen, rest = self._choose(tokens)
        if self._chosen is not None:
            self._chosen.commit(rest)

    def _choose(self, tokens: Sequence[int]) -> tuple[GrammarState | None, Sequence[int]]:
        """Who is asked about `tokens`, and about which of them; nobody before the first one."""
        if self._chosen is not None or not tokens:
            return self._chosen, tokens
        if tokens[0] == self._opening:
            return self._behind, tokens[1:]
        return self._inner, tokens
