"""One request to an OpenAI-compatible server, timed as its client sees it. Knows no statistics."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any, NamedTuple
from urllib.parse import urlsplit

TIMEOUT_S = 300.0


@dataclass(slots=True)
class Asked:
    """What became of a request. Times in seconds: from sending it to the first token, and to the
    end. `has_left`: this client closed the connection itself. `error` None where all went well."""

    n_tokens: int = 0
    first_s: float | None = None
    seconds: float = 0.0
    has_left: bool = False
    error: str | None = None

    @property
    def per_token_s(self) -> float | None:
        """Seconds per token after the first; None for answers that were left or are too short."""
        if self.has_left or self.error or self.first_s is None or self.n_tokens < 2:
            return None
        return (self.seconds - self.first_s) / (self.n_tokens - 1)


class Server(NamedTuple):
    """Where to ask: `url` ends in /v1."""

    url: str
    api_key: str | None = None


@contextmanager
def posted(server: Server, body: Mapping[str, Any]) -> Iterator[HTTPResponse]:
    """The response to a chat completion's request. Raises `OSError` and `HTTPException`."""
    parts = urlsplit(server.url)
    with closing(HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_S)) as connection:
        headers = {"Content-Type": "application/json"}
        if server.api_key:
            headers["Authorization"] = f"Bearer {server.api_key}"
        connection.request("POST", f"{parts.path}/chat/completions", json.dumps(body), headers)
        yield connection.getresponse()


def ask(server: Server, body: Mapping[str, Any], leave_after: int | None = None) -> Asked:
    """Streams a chat completion; leaves after so many pieces, unless None. Never raises for what a
    server or the network does."""
    asked = Asked()
    start = time.perf_counter()
    try:
        with posted(server, {**body, "stream": True, "return_token_ids": True}) as response:
            _read(response, asked, start, leave_after)
    except (OSError, HTTPException, ValueError) as error:
        asked.error = f"{type(error).__name__}: {error}"
    asked.seconds = time.perf_counter() - start
    return asked


def _read(response: HTTPResponse, asked: Asked, start: float, leave_after: int | None) -> None:
    if response.status != 200:
        asked.error = f"status {response.status}"
        return
    n_pieces = 0
    for event in _events(response):
        if "error" in event:
            asked.error = str(event["error"].get("message"))
            return
        for choice in event["choices"]:
            n_tokens = _n_tokens(choice)
            if n_tokens:
                asked.first_s = asked.first_s or time.perf_counter() - start
                asked.n_tokens += n_tokens
                n_pieces += 1
        if leave_after is not None and n_pieces >= leave_after:
            asked.has_left = True
            return


def _n_tokens(choice: Mapping[str, Any]) -> int:
    """The tokens of a piece; of other servers, which do not tell ids, each piece counts as one."""
    delta = choice.get("delta") or {}
    has_text = bool(delta.get("content") or delta.get("reasoning_content"))
    return len(choice["token_ids"]) if "token_ids" in choice else int(has_text)


def _events(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    """Up to the last event. Raises `ConnectionError` where there is none."""
    for line in response:
        data = line.strip()
        if data == b"data: [DONE]":
            return
        if data.startswith(b"data: "):
            yield json.loads(data.removeprefix(b"data: "))
    raise ConnectionError("the stream ended before it was complete")
