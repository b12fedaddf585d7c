"""Separates what a model thinks, `<think>...</think>`, from what it answers.

DeepSeek R1's and V3.1's prompts end with the opening tag, so that only the closing one is in the
text (llama.cpp #11861); the first R1 templates leave the opening tag to the model. Knows neither
tokens nor templates.
"""

from __future__ import annotations

from typing import NamedTuple

from gguf_mtp.chat.markers import Seeker

__all__ = ["CLOSE", "OPEN", "ReasoningParser", "Split", "is_open", "may_open"]

OPEN, CLOSE = "<think>", "</think>"


class Split(NamedTuple):
    """Text that became certain, each part to be appended to what came before."""

    reasoning: str = ""
    content: str = ""


def is_open(prompt: str) -> bool:
    """Whether the answer to `prompt` begins inside the reasoning."""
    return prompt.rstrip().endswith(OPEN)


def may_open(prompt: str) -> bool:
    """Whether the answer to `prompt` may begin with reasoning that it opens itself."""
    return not prompt.rstrip().endswith((OPEN, CLOSE))


class ReasoningParser:
    """Splits a text that comes in pieces; the same parts come out whatever the pieces.

    Whitespace around the reasoning belongs to neither part. A text that ends inside the reasoning,
    as when max_tokens cuts it, is all reasoning. `end` is where the content begins, in characters
    of the whole text; None while it has not begun.
    """

    def __init__(self, is_open: bool) -> None:
        self.end: int | None = None
        self._is_reasoning = is_open
        self._has_started = False
        self._closing = Seeker(CLOSE)
        self._held = ""  # before the start: maybe a tag; afterwards whitespace that may be trimmed
        self._trims = True  # leading whitespace of the part that comes next
        self._n_seen = 0

    def add(self, text: str) -> Split:
        self._n_seen += len(text)
        if not self._has_started:
            text = self._start(text)
            if not self._has_started:
                return Split()
        if not self._is_reasoning:
            return Split(content=self._lead(text))
        found = self._closing.add(text)
        reasoning = self._reasoning(found.before)
        if found.marker is None:
            return Split(reasoning)
        self._is_reasoning, self._held, self._trims = False, "", True
        self.end = self._n_seen - len(found.after)
        return Split(reasoning, self._lead(found.after))

    def finish(self) -> Split:
        """What was held back at the end of the text."""
        if not self._has_started:
            self._has_started = True
            held, self._held = self._held, ""
            return Split(reasoning=held.strip()) if self._is_reasoning else Split(content=held)
        if self._is_reasoning:
            return Split(self._reasoning(self._closing.finish()))
        return Split()

    def _start(self, text: str) -> str:
        """Looks whether the text opens the reasoning itself; the text that follows, once known."""
        self._held += text
        begun = self._held.lstrip()
        if OPEN.startswith(begun) and begun != OPEN:
            return ""  # not enough to tell
        self._has_started = True
        text, self._held = self._held, ""
        if begun.startswith(OPEN):
            self._is_reasoning = True
            return begun.removeprefix(OPEN)
        if not self._is_reasoning:
            self.end = 0
            self._trims = False
        return text

    def _lead(self, text: str) -> str:
        """`text` without the whitespace that a part begins with."""
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        return text

    def _reasoning(self, text: str) -> str:
        """Reasoning without the whitespace it begins with; what it ends with is held back."""
        text = self._held + self._lead(text)
        shown = text.rstrip()
        self._held = text[len(shown) :]
        return shown
