"""Sequential reads from one file, each checked against its size and against absurd lengths.

Knows numbers, texts and counts of a GGUF file, but not their order: that is `header.py`.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any, BinaryIO

from gguf_mtp.errors import LoadFailed

__all__ = ["Cursor"]

MAX_KEPT = 1024  # of longer lists the length is kept
MAX_STRING = 16 << 20
# Real headers are 5 to 15 MB, vocabulary included; a larger one is garbage that would take minutes.
MAX_HEADER = 64 << 20


class Cursor:
    """A position in `file`. Every method raises `LoadFailed` instead of reading past the end."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.file, self.path = file, path
        self.size = os.fstat(file.fileno()).st_size
        self._at = self._read = 0

    def tell(self) -> int:
        return self._at

    def damaged(self, what: str) -> LoadFailed:
        return LoadFailed(f"{self.path} is damaged: {what}")

    def expect(self, n: int, width: int, what: str) -> None:
        """Refuse a count of `n` items, at least `width` bytes each, that cannot fit the file."""
        if n * width > self.size - self._at:
            raise LoadFailed(
                f"{self.path} is damaged or cut short: expected {n} {what} at byte {self._at}, "
                f"but the file ends at byte {self.size}"
            )

    def take(self, n: int) -> bytes:
        self.expect(n, 1, "bytes")
        self._read += n
        if self._read > MAX_HEADER:
            raise self.damaged(f"its header is larger than {MAX_HEADER >> 20} MiB")
        data = self.file.read(n)
        if len(data) != n:
            raise LoadFailed(f"{self.path} shrank while it was read")
        self._at += n
        return data

    def skip(self, n: int) -> None:
        self._at = self.file.seek(self._at + n)

    def number(self, fmt: str) -> Any:
        return struct.unpack(fmt, self.take(struct.calcsize(fmt)))[0]

    def text(self) -> str:
        n = self.number("<Q")
        if n > MAX_STRING:
            raise self.damaged(f"the string of {n} bytes at byte {self._at} is too long")
        return self.take(n).decode("utf-8", errors="replace")

    def texts(self, n: int, unique: bool, key: str) -> list[str] | int:
        """`n` strings, or their number when there are many; `unique` refuses an equal pair.

        llama.cpp aborts the process on a vocabulary with two equal tokens (empty ones it renames).
        """
        if n <= MAX_KEPT and not unique:
            return [self.text() for _ in range(n)]
        seen: set[bytes] = set()
        length = struct.Struct("<Q")
        for index in range(n):
            (size,) = length.unpack(self.take(8))
            if size > MAX_STRING:
                raise self.damaged(f"a string of {size} bytes in {key} is too long")
            text = self.take(size).partition(b"\0")[0]  # llama.cpp reads it as a C string
            if unique and text:
                if text in seen:
                    raise self.damaged(f"token {index} of {key} repeats an earlier one: {text!r}")
                seen.add(text)
        return n
