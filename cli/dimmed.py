"""Text that is not part of an answer, dimmed where the terminal can."""

from __future__ import annotations

import os
from typing import TextIO

__all__ = ["write_dimmed"]


def write_dimmed(text: str, file: TextIO) -> None:
    """Writes `text` as it is: no markup, no emoji names, no wrapping."""
    can_dim = file.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    file.write(f"\x1b[2m{text}\x1b[22m" if can_dim and text else text)
    file.flush()
