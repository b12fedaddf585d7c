"""llguidance's messages, as a person wants to read them."""

from __future__ import annotations

import re

__all__ = ["reason_of"]

MAX_REASON = 300
"""Characters."""
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_SOURCE = re.compile(r"\d+ \|")


def reason_of(error: str) -> str:
    """llguidance's message in one line: the place in words, without its dump of the source."""
    error = error.partition("<non-verbose/>")[0].partition("; following special tokens")[0]
    if error.startswith("panic"):
        return "the grammar library could not process it"
    lines = [line.strip() for line in error.removeprefix("Parser Error: ").splitlines()]
    said = [line for line in lines if line.strip("^") and not _SOURCE.match(line)]
    text = "; ".join(said)
    if not text or text.startswith("NoExtension"):
        return "it allows no text"
    return _PLACE.sub(r"line \1, column \2: ", text)[:MAX_REASON]
