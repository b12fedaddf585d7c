"""Finds markers such as `</think>` in a text that comes in pieces.

It knows no format: reasoning and tool calls are parsed with it.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Found", "Seeker"]


class Found(NamedTuple):
    """`before` is the text up to the marker, or all that cannot belong to one. `marker` is which
    one came, None while none has; `after` is what followed it."""

    before: str
    marker: str | None = None
    after: str = ""


class Seeker:
    """Gives text out until the first of `markers`; the beginning of one is held back.

    None of the markers may begin with another. After one was found
    the seeker is spent.
    """

    def __init__(self, *markers: str) -> None:
        self._markers = markers
        self._held = ""

    def add(self, text: str) -> Found:
        known = self._held + text
        hits = [(at, marker) for marker in self._markers if (at := known.find(marker)) >= 0]
        if hits:
            at, marker = min(hits)
            self._held = ""
            return Found(known[:at], marker, known[at + len(marker) :])
        n_shown = len(known) - self._n_held(known)
        self._held = known[n_shown:]
        return Found(known[:n_shown])

    def finish(self) -> str:
        """What was held back at the end of the text: it is no marker after all."""
        held, self._held = self._held, ""
        return held

    def _n_held(self, text: str) -> int:
        """How many last characters of `text` may still become a marker."""
        longest = max(map(len, self._markers)) - 1
        for n in range(min(longest, len(text)), 0, -1):
            if any(marker.startswith(text[-n:]) for marker in self._markers):
                return n
        return 0
