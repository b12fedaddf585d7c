"""Text files that options name."""

from __future__ import annotations

from pathlib import Path

__all__ = ["read_text"]


MOST = 16 << 20
"""Characters; what a device or a pipe gives may never end."""


def read_text(file: Path, most: int = MOST) -> str:
    """The text of a file in UTF-8, of at most `most` characters. Raises `RequestError`."""
    from ..errors import RequestError

    try:
        with file.open(encoding="utf-8-sig") as stream:  # editors on Windows write a BOM
            text = stream.read(most + 1)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise RequestError(f"cannot read {file}: {why}") from None
    if len(text) > most:
        raise RequestError(f"{file} has more than {most} characters")
    return text
