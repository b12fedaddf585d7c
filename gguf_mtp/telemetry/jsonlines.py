"""Records as JSON lines in a file, written by a thread of its own.

Whoever writes never waits: a full disk, a pipe that nobody reads or a slow network share costs
lines, which are counted and warned of, and neither time nor the process. Knows nothing of what the
records mean.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gguf_mtp.errors import GgufMtpError

log = logging.getLogger(__name__)

__all__ = ["JsonLines", "as_json"]

MOST = 20_000
"""Records that may wait for the disk; beyond them they are lost."""
CLOSE_S = 5.0


def as_json(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False, separators=(",", ":"))


class JsonLines:
    """`write` may be called from any thread. A line is whole or not there at all, and it is there
    within moments. `path` None is standard output; `keeps` appends to an existing file; `form`
    makes a line of a record, where it is not to be JSON.

    Raises `GgufMtpError` when the file cannot be opened.
    """

    def __init__(
        self,
        path: Path | None,
        keeps: bool = True,
        form: Callable[[Mapping[str, Any]], str] = as_json,
    ) -> None:
        self.name = str(path) if path else "standard output"
        self.n_lost = 0
        self._fd, self._form = _open(path, keeps), form
        self._waiting: deque[Mapping[str, Any]] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._is_failing = False
        self._thread = threading.Thread(target=self._run, name="lines", daemon=True)
        self._thread.start()

    def write(self, record: Mapping[str, Any]) -> None:
        with self._changed:
            if self._is_closed or len(self._waiting) >= MOST:
                self.n_lost += 1
                return
            self._waiting.append(record)
            self._changed.notify()

    def close(self) -> None:
        """Writes what waits, unless that takes longer than a few seconds."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.warning("writing to %s timed out: its last lines are lost", self.name)
        else:
            os.close(self._fd)

    # -- on the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                records, self._waiting = self._waiting, deque()
            if not records:
                return
            lines = [self._form(record).replace("\n", " ") for record in records]
            try:
                text = "".join(f"{line}\n" for line in lines)
                _append(self._fd, text.encode(errors="backslashreplace"))
            except OSError as error:
                self._lose(len(lines), error)
            else:
                self._is_failing = False

    def _lose(self, n_lines: int, error: OSError) -> None:
        with self._changed:
            self.n_lost += n_lines
        if not self._is_failing:  # once, not for every line
            log.warning("lines for %s are being lost: %s", self.name, error.strerror)
        self._is_failing = True


def _open(path: Path | None, keeps: bool) -> int:
    if path is None:
        return os.dup(1)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (0 if keeps else os.O_TRUNC)
    try:
        fd = os.open(path, flags, 0o644)
    except OSError as error:
        raise GgufMtpError(f"cannot write {path}: {error.strerror}") from None
    if keeps and stat.S_ISREG(os.fstat(fd).st_mode) and _is_torn(path):
        with suppress(OSError):
            os.write(fd, b"\n")
    return fd


def _is_torn(path: Path) -> bool:
    """Whether the last line has no end: whoever wrote it was killed, or the power went."""
    try:
        with path.open("rb") as file:
            if not file.seek(0, os.SEEK_END):
                return False
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:
        return False


def _append(fd: int, data: bytes) -> None:
    """All of `data` or nothing of it, where the file can be cut back."""
    status = os.fstat(fd)
    left = memoryview(data)
    try:
        while left:
            left = left[os.write(fd, left) :]
    except OSError:
        if stat.S_ISREG(status.st_mode):
            os.ftruncate(fd, status.st_size)
        raise
