"""Tokens to printable text as they come.

What it gives out, put together, is what decoding the whole answer would give, whatever the chunks.
It knows no model; a vocabulary is a function from id to bytes.
"""

from __future__ import annotations

import codecs
from bisect import bisect_right
from collections.abc import Callable, Iterable

__all__ = ["Detokenizer"]


class Detokenizer:
    """Token ids in, text out as soon as it is whole characters.

    All that `add` returned, and `finish` last, equals
    `b"".join(map(piece, tokens)).decode("utf-8", errors="replace")`.
    """

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        self._piece = piece
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._n_chars = 0
        self._ends: list[int] = []  # for each token, the characters up to its last byte

    def add(self, tokens: Iterable[int]) -> str:
        """The text that became printable with these tokens."""
        return "".join(map(self._add, tokens))

    def _add(self, token: int) -> str:
        text = self._decoder.decode(self._piece(token))
        self._n_chars += len(text)
        # Bytes of a character that is not whole yet belong to that character.
        is_whole = not self._decoder.getstate()[0]
        self._ends.append(self._n_chars if is_whole else self._n_chars + 1)
        return text

    def finish(self) -> str:
        """What is left at the end: a character that never became whole, as U+FFFD."""
        text = self._decoder.decode(b"", final=True)
        self._n_chars += len(text)
        return text

    def n_tokens(self, n_chars: int) -> int:
        """How many tokens lie wholly within the first `n_chars` characters.

        So it is also the index of the token in which character `n_chars` begins: where a stop
        string starts there, ids, logprobs and counts are cut to `[:n_tokens(n_chars)]`.
        """
        return bisect_right(self._ends, n_chars)
