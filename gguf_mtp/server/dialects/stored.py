"""Conversations of `/v1/responses` that a later request may go on with, within a bound."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gguf_mtp.errors import RequestError

__all__ = ["ResponseStore", "StoredResponse"]

MOST, MOST_CHARS = 1_000, 64_000_000
"""Responses that are kept, and the characters of all of them."""


class StoredResponse(NamedTuple):
    """A response, and the chat messages up to its end."""

    response: Mapping[str, Any]
    messages: Sequence[dict[str, Any]]
    n_chars: int


class ResponseStore:
    """The last responses in memory; the ones not used for longest go first."""

    def __init__(self, most: int = MOST, most_chars: int = MOST_CHARS) -> None:
        self._most, self._most_chars = most, most_chars
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()
        self._n_chars = 0
        self._lock = threading.Lock()

    def add(self, response: Mapping[str, Any], messages: Sequence[dict[str, Any]]) -> None:
        """Keeps it under its id, unless it alone is too large."""
        n_chars = len(str(response)) + len(str(messages))
        if n_chars > self._most_chars:
            return
        with self._lock:
            self._kept[str(response["id"])] = StoredResponse(response, messages, n_chars)
            self._n_chars += n_chars
            while len(self._kept) > self._most or self._n_chars > self._most_chars:
                self._n_chars -= self._kept.popitem(last=False)[1].n_chars

    def find(self, id_: str) -> StoredResponse:
        """Raises `RequestError` for one that is not kept, or not any more."""
        with self._lock:
            found = self._kept.get(id_)
            if found is None:
                raise RequestError(
                    f"there is no response {id_!r}: the server keeps the last {self._most} of this "
                    "run, unless store is false; send the whole conversation as input"
                )
            self._kept.move_to_end(id_)
            return found

    def delete(self, id_: str) -> None:
        """Raises as `find`."""
        found = self.find(id_)
        with self._lock:
            if self._kept.pop(id_, None) is not None:
                self._n_chars -= found.n_chars
