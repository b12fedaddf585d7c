"""Where each token of an answer came from, for clients that show it.

An answer is then read token by token, so that every piece of text has one origin. Knows no text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from gguf_mtp.types import Chunk

__all__ = ["TokenSource", "TokenSources"]

TARGET = "target"
"""The origin of a token that no drafter guessed."""


class TokenSource(NamedTuple):
    """What came since the last one: its last token's drafter, or the target, and counts."""

    source: str
    n_tokens: int
    n_rounds: int
    n_drafted: int
    n_accepted: int


class TokenSources:
    """Counts one answer's chunks. `split` gives their tokens one by one, `take` what was counted of
    those so far and not taken before: a token whose text is held back counts with the next."""

    def __init__(self) -> None:
        self._source = TARGET
        self._n_tokens = self._n_rounds = self._n_drafted = self._n_accepted = 0

    def split(self, chunk: Chunk) -> Iterator[Chunk]:
        """Chunks of at most one token; the last one is the end if `chunk` was."""
        if chunk.tokens:
            self._n_rounds += 1
            self._n_drafted += chunk.n_drafted
            self._n_accepted += chunk.n_from_draft
        middle = chunk._replace(finish_reason=None, stats=None)
        for i, token in enumerate(chunk.tokens):
            is_drafted = i < chunk.n_from_draft
            self._source = chunk.source if is_drafted else TARGET
            self._n_tokens += 1
            whole = chunk if i == len(chunk.tokens) - 1 else middle
            logprobs = chunk.logprobs and chunk.logprobs[i : i + 1]
            yield whole._replace(tokens=[token], n_from_draft=int(is_drafted), logprobs=logprobs)
        if not chunk.tokens:
            yield chunk

    def take(self) -> TokenSource:
        origin = TokenSource(
            self._source, self._n_tokens, self._n_rounds, self._n_drafted, self._n_accepted
        )
        self._n_tokens = self._n_rounds = self._n_drafted = self._n_accepted = 0
        return origin
