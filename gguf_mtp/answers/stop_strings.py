"""Stop strings in a text that comes in pieces: it ends before the first of them.

What it gives out, put together, is what searching the whole text would give, whatever the pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gguf_mtp.errors import RequestError

__all__ = ["Cut", "StopStrings"]


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
        self.found: str | None = None  # the stop string that ended the text

    def add(self, text: str) -> Cut:
        """The text that may be shown now; nothing more once a stop string was found."""
        if self._at is not None:
            return Cut("", self._at)
        if not self._stops:
            return Cut(text, None)
        for index, char in enumerate(text):
            stop = self._step(char)
            if stop is not None:
                self.found = stop
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
