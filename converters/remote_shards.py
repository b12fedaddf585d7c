"""Shards of a checkpoint read over HTTP, a block at a time, and kept nowhere.

For a machine without room for the checkpoint: only the output needs disk. Blocks are large, so that
a tensor takes few requests, and the newest stay in memory, for neighbours are read next.
"""

from __future__ import annotations

import errno
from collections import OrderedDict
from concurrent.futures import Future
from threading import Lock

from ..errors import ConversionError
from .hub import Hub, Repo

BLOCK = 1 << 22
KEPT = 24
"""Blocks in memory: 96 MiB."""


class RemoteShards:
    """A `local_shards.Shards` over a hub's repository."""

    def __init__(self, hub: Hub, repo: Repo) -> None:
        self._hub, self._repo = hub, repo
        self._sizes: dict[str, tuple[int, str]] = {}
        self._blocks: OrderedDict[tuple[str, int], Future[bytes]] = OrderedDict()
        self._lock = Lock()

    def has(self, file: str) -> bool:
        try:
            self._sizes[file] = self._hub.size(self._repo, file)
        except FileNotFoundError:
            return False
        return True

    def open(self, file: str) -> tuple[int, str]:
        if file not in self._sizes:
            self._sizes[file] = self._hub.size(self._repo, file)
        return self._sizes[file]

    def read_into(self, file: str, at: int, buffer: memoryview) -> None:
        done = 0
        while done < len(buffer):
            index, begin = divmod(at + done, BLOCK)
            block = self._block(file, index)
            part = block[begin : begin + len(buffer) - done]
            if not part:
                raise OSError(errno.EIO, "the file is shorter than its header says", file)
            buffer[done : done + len(part)] = part
            done += len(part)

    def expect(self, n_bytes: int) -> None:
        pass  # nothing is cached on a disk

    def close(self) -> None:
        self._blocks.clear()

    def _block(self, file: str, index: int) -> bytes:
        """One thread fetches a block, others that want it wait for it."""
        key = file, index
        with self._lock:
            future = self._blocks.get(key)
            mine = future is None
            if future is None:
                future = self._blocks[key] = Future()
                while len(self._blocks) > KEPT:
                    self._blocks.popitem(last=False)
            self._blocks.move_to_end(key)
        if mine:
            try:
                future.set_result(self._fetch(file, index))
            except BaseException as error:
                with self._lock:
                    self._blocks.pop(key, None)
                future.set_exception(error)
        return future.result()

    def _fetch(self, file: str, index: int) -> bytes:
        size, _ = self._sizes[file]
        at = index * BLOCK
        if at >= size:
            return b""
        try:
            return self._hub.read(self._repo, file, at, min(BLOCK, size - at))
        except (ConversionError, FileNotFoundError) as error:
            # What was written so far stays, as when a disk fails: the hub may come back.
            raise OSError(errno.EIO, str(error), file) from None
