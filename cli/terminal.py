"""A person's terminal: an editable prompt with history, dim notes, answers as they come."""

from __future__ import annotations

import sys

from prompt_toolkit import PromptSession
from prompt_toolkit.history import InMemoryHistory
from rich.console import Console

from .dimmed import write_dimmed


class Terminal:
    """A `conversation.Screen` for people. Pasted lines arrive whole (bracketed paste)."""

    def __init__(self) -> None:
        self._prompt: PromptSession[str] = PromptSession(history=InMemoryHistory())
        self._console = Console(highlight=False)

    def ask(self, gauge: str) -> str | None:
        while True:
            try:
                return self._prompt.prompt([("", f"[{gauge}] " if gauge else ""), ("bold", "> ")])
            except EOFError:
                return None
            except KeyboardInterrupt:
                continue  # Ctrl+C clears the line; Ctrl+D leaves

    def write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def think(self, text: str) -> None:
        write_dimmed(text, sys.stdout)

    def say(self, text: str) -> None:
        self.note(text)

    def note(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False)
