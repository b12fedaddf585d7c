"""Tokens to printable text as they come, and stop strings in it.

Both are exact: what they give out, put together, is what decoding or searching the whole text would
give, whatever the chunks. They know no model; a vocabulary is a function from id to bytes.
"""

from __future__ import annotations

import codecs
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from gguf_mtp.errors import RequestError

__all__ = ["Cut", "Detokenizer", "StopStrings"]


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


class Cut(NamedTuple):
    """`text` may be shown. `at` is where a stop string begins, in characters of the whole text."""

    text: str
    at: int | None


class StopStrings:
    """Ends a text before the stop string that is complete first, whatever the chunks.

    Where two are complete with the same character, before the longer one. What may still become a
    stop string is held back. Time is linear in the text (one Knuth-Morris-Pratt automaton a stop).
    Raises `RequestError` for an empty stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise RequestError("a stop string is empty")
        self._stops = sorted(stops, key=len, reverse=True)
        self._failures = [_failures(stop) for stop in self._stops]
        self._matched = [0] * len(stops)  # for each stop, how much of it the text ends with
        self._held = ""
        self._n_seen = 0
        self._at: int | None = None

    def add(self, text: str) -> Cut:
        """The text that may be shown now; nothing more once a stop string was found."""
        if self._at is not None:
            return Cut("", self._at)
        if not self._stops:
            return Cut(text, None)
        for index, char in enumerate(text):
            stop = self._step(char)
            if stop is not None:
                self._at = self._n_seen + index + 1 - len(stop)
                shown = (self._held + text)[: self._at - self._n_seen + len(self._held)]
                self._held = ""
                return Cut(shown, self._at)
        self._n_seen += len(text)
        known = self._held + text
        n_shown = len(known) - max(self._matched)
        self._held = known[n_shown:]
        return Cut(known[:n_shown], None)

    def finish(self) -> str:
        """What was held back at the end of the text: it is no stop string after all."""
        held, self._held = self._held, ""
        return held

    def _step(self, char: str) -> str | None:
        for index, stop in enumerate(self._stops):
            n, failures = self._matched[index], self._failures[index]
            while n and stop[n] != char:
                n = failures[n]
            n += stop[n] == char
            if n == len(stop):
                return stop  # the longest: they are sorted
            self._matched[index] = n
        return None


def _failures(stop: str) -> list[int]:
    """`failures[n]`: the longest proper prefix of `stop` that `stop[:n]` ends with."""
    failures, n = [0, 0], 0
    for char in stop[1:]:
        while n and stop[n] != char:
            n = failures[n]
        n += stop[n] == char
        failures.append(n)
    return failures
