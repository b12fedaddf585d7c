"""Where a checkpoint's shards lie, and their bytes on demand: the seam, and files in a folder.

It knows nothing of formats.
"""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path
from typing import Protocol


class Shards(Protocol):
    """Where a checkpoint's shards lie. `open` gives a shard's size and a stamp of its contents;
    `read_into` fills the buffer from byte `at` on, also from several threads, or raises `OSError`
    with the shard's name. `expect` tells how many bytes the tensors have together."""

    def has(self, file: str) -> bool: ...
    def open(self, file: str) -> tuple[int, str]: ...
    def read_into(self, file: str, at: int, buffer: memoryview) -> None: ...
    def expect(self, n_bytes: int) -> None: ...
    def close(self) -> None: ...


class LocalShards:
    """Shards in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fds: dict[str, int] = {}
        self._forgets = False

    def has(self, file: str) -> bool:
        return (self._folder / file).exists()

    def open(self, file: str) -> tuple[int, str]:
        self._fds[file] = os.open(self._folder / file, os.O_RDONLY)
        status = os.fstat(self._fds[file])
        # Tools set the time of the last write back; that of the last change they cannot.
        return status.st_size, f"{status.st_mtime_ns} {status.st_ctime_ns}"

    def read_into(self, file: str, at: int, buffer: memoryview) -> None:
        path, done = os.fspath(self._folder / file), 0
        while done < len(buffer):
            try:
                n = os.preadv(self._fds[file], [buffer[done:]], at + done)
            except OSError as error:
                raise OSError(error.errno, error.strerror, path) from None
            if n == 0:
                raise OSError(errno.EIO, "the file became shorter while it was read", path)
            done += n
        if self._forgets:
            # Cached pages of what is read once would only push out other programs' pages.
            os.posix_fadvise(self._fds[file], at, done, os.POSIX_FADV_DONTNEED)

    def expect(self, n_bytes: int) -> None:
        self._forgets = n_bytes > _memory() / 2

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])


def _memory() -> float:
    """Bytes of memory; infinity where the system cannot say, or takes no advice on its cache."""
    if not hasattr(os, "posix_fadvise"):
        return math.inf
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
