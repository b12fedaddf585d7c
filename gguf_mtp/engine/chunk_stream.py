"""The chunks of some requests, read one after the other, while others read theirs.

A round moves every sequence of the engine, whoever runs it. So each stream has an inbox: what a
round brings for requests of other streams waits there until they are read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from gguf_mtp.errors import GgufMtpError
from gguf_mtp.types import Chunk

__all__ = ["ChunkStream", "Inboxes"]


class Inboxes:
    """Which chunks wait for whom. `abandoned` are requests whose stream was dropped, by whatever
    thread collected it: the engine's own cancels them before its next round."""

    def __init__(self) -> None:
        self.abandoned: deque[int] = deque()
        self._unclaimed: list[Chunk] = []
        self._of: dict[int, deque[Chunk]] = {}

    def open(self, ids: Sequence[int]) -> deque[Chunk]:
        inbox: deque[Chunk] = deque()
        self._of |= dict.fromkeys(ids, inbox)
        return inbox

    def close(self, id_: int) -> None:
        self._of.pop(id_, None)

    def distribute(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            self._of.get(chunk.seq, self._unclaimed).append(chunk)

    def take_unclaimed(self) -> list[Chunk]:
        taken, self._unclaimed = self._unclaimed, []
        return taken


class ChunkStream:
    """An iterator over the chunks of the requests `ids`; a chunk's `seq` is its request's index.

    Raises the error that a request failed with, after the tokens before it. `cancel` ends what is
    unfinished; so does `close`. A stream that is dropped ends before the engine's next round.
    """

    def __init__(
        self,
        ids: Sequence[int],
        inboxes: Inboxes,
        run_round: Callable[[], Sequence[Chunk]],
        cancel: Callable[[int], Chunk | None],
    ) -> None:
        self._inboxes, self._run_round, self._cancel = inboxes, run_round, cancel
        self._indices = {id_: index for index, id_ in enumerate(ids)}
        self._inbox = inboxes.open(ids)
        self._error: GgufMtpError | None = None

    def __iter__(self) -> ChunkStream:
        return self

    def __next__(self) -> Chunk:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if not self._indices:
            raise StopIteration
        while not self._inbox:
            self._inboxes.distribute(self._run_round())
        chunk = self._inbox.popleft()
        index = self._indices[chunk.seq]
        if chunk.finish_reason:
            self._end(chunk.seq)
        if chunk.error is not None:
            if not chunk.tokens:
                raise chunk.error
            self._error = chunk.error
            return chunk._replace(seq=index, finish_reason=None, error=None)
        return chunk._replace(seq=index)

    def cancel(self) -> list[Chunk]:
        """Ends what is unfinished; the last chunk of each such request."""
        last = []
        for id_, index in list(self._indices.items()):
            chunk = self._cancel(id_) or self._ended(id_)
            self._end(id_)
            if chunk is not None:
                last.append(chunk._replace(seq=index))
        return last

    def close(self) -> None:
        self.cancel()

    def __del__(self) -> None:
        self._inboxes.abandoned.extend(self._indices)

    def _ended(self, id_: int) -> Chunk | None:
        """The last chunk of a request that another stream's round has ended meanwhile."""
        return next((c for c in self._inbox if c.seq == id_ and c.finish_reason), None)

    def _end(self, id_: int) -> None:
        del self._indices[id_]
        self._inboxes.close(id_)
