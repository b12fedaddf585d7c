"""A conversation with an OpenAI-compatible server: ours, or any other.

`RemoteSession` stands where `conversation.Conversation` expects a session. Lines are read by a
thread, so that Ctrl+C is seen while a server is silent; closing an answer closes its connection,
which tells the server to stop. Knows no terminal.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
import urllib.parse
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, fields
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any

from ..answers.parse import Finish
from ..chat.reasoning import ReasoningParser, Split
from ..depth import FixedDepth
from ..depth.protocol import Depth
from ..errors import ContextFull, RequestError
from ..params import AS_MANY_AS_FIT, SamplingParams
from ..session import Piece
from ..stats import Stats

LOOK_S = 0.2  # how often a silent answer lets its reader look up
CONNECT_S = 10.0


@dataclass(slots=True)
class RemoteEngine:
    """What is known of the engine behind a server: the account it sends, when it is ours."""

    totals: Stats = field(default_factory=Stats)
    depth: Depth = field(default_factory=lambda: FixedDepth(0))
    stopped_drafting: str | None = None


class RemoteSession:
    """A server's model. `fields` go into every request as they are."""

    def __init__(
        self, url: str, model: str | None, api_key: str | None, fields: Mapping[str, Any]
    ) -> None:
        """Raises `RequestError` when the server cannot be reached or names no model."""
        self.url = api_base(url)
        self.engine = RemoteEngine()
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            given = os.fsencode(api_key).decode("latin-1")  # the bytes of the command line
            self._headers["Authorization"] = f"Bearer {given}"
        self._fields = dict(fields)
        self.model = model or self._first_model()

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        params: SamplingParams | None = None,
        max_tokens: int = AS_MANY_AS_FIT,
    ) -> Iterator[Piece]:
        """The answer to `messages`, piece by piece; pieces may be empty. How to sample is the
        server's business and that of `fields`: `params` must be None."""
        assert params is None
        body = {"model": self.model, "messages": list(messages), "stream": True, **self._fields}
        if max_tokens < AS_MANY_AS_FIT:
            body["max_tokens"] = max_tokens
        return self._pieces(self._connect("/chat/completions", body))

    @property
    def n_ctx(self) -> None:
        """It is the server's business."""

    def count(self, messages: Sequence[Mapping[str, str]]) -> None:
        """Its tokens are not known here."""

    def _pieces(self, connection: HTTPConnection) -> Iterator[Piece]:
        splitter = ReasoningParser(is_open=False)  # for servers that leave it in the text
        with closing(_events(connection)) as events:
            for event in events:
                if "error" in event:
                    raise _error(event, "the server failed")
                stats = _stats(event.get("timings"))
                if stats:
                    self.engine.totals += stats
                choice = (event.get("choices") or [{}])[0]
                delta = choice.get("delta") or {}
                finish = _finish(choice.get("finish_reason"))
                split = splitter.add(delta.get("content") or "")
                last = splitter.finish() if finish else Split()
                told = delta.get("reasoning_content") or delta.get("reasoning") or ""
                yield Piece(
                    text=split.content + last.content,
                    reasoning=told + split.reasoning + last.reasoning,
                    finish_reason=finish,
                    stats=stats,
                )

    def _first_model(self) -> str:
        with closing(self._connect("/models", None)) as connection, _as_sentence(self.url):
            response = connection.getresponse()
            found = _parse(response.read())
        if response.status != 200:
            raise RequestError(_said(found, f"{self.url} answered {response.status}"))
        try:
            return str(found["data"][0]["id"])
        except (LookupError, TypeError):
            raise RequestError(f"{self.url} lists no model; give a model name") from None

    def _connect(self, path: str, body: Mapping[str, Any] | None) -> HTTPConnection:
        """A connection that the request has been sent on."""
        parts = urllib.parse.urlsplit(self.url)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        with _as_sentence(self.url):
            connection = kind(parts.hostname or "", parts.port, timeout=CONNECT_S)
            connection.connect()
            method, data = ("GET", None) if body is None else ("POST", json.dumps(body))
            connection.request(method, f"{parts.path}{path}", data, self._headers)
        return connection


@contextmanager
def _as_sentence(url: str) -> Iterator[None]:
    """Turns what can go wrong on a connection into a `RequestError`."""
    try:
        yield
    except (OSError, HTTPException, ValueError) as error:
        raise RequestError(f"cannot reach {url}: {error}") from None


def api_base(url: str) -> str:
    """`localhost:8080` as `http://localhost:8080/v1`; a path that is given stays."""
    parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
    return parts._replace(path=parts.path.rstrip("/") or "/v1", query="", fragment="").geturl()


def _events(connection: HTTPConnection) -> Generator[dict[str, Any], None, None]:
    """The events of a stream; an empty one now and then while there are none."""
    lines: queue.Queue[bytes | RequestError | None] = queue.Queue()
    sock = connection.sock
    sock.settimeout(None)  # a prompt may take long to read

    def read() -> None:
        try:
            response = connection.getresponse()
            if response.status == 200:
                for line in response:
                    lines.put(line)
            else:
                lines.put(_error(_parse(response.read()), f"the server answered {response.status}"))
        except (OSError, HTTPException, ValueError) as error:
            lines.put(RequestError(f"the connection was lost: {error}"))
        lines.put(None)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield from _until_done(lines)
    finally:
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)  # wakes the reader
        reader.join()
        connection.close()


def _until_done(lines: queue.Queue[bytes | RequestError | None]) -> Iterator[dict[str, Any]]:
    while True:
        try:
            line = lines.get(timeout=LOOK_S)
        except queue.Empty:
            yield {}
            continue
        if isinstance(line, RequestError):
            raise line
        if line is None or line.strip() == b"data: [DONE]":
            return
        if line.startswith(b"data:"):
            yield _parse(line[5:])


def _parse(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _said(answer: Mapping[str, Any], otherwise: str) -> str:
    """The message of an error in OpenAI's shape, in one line."""
    error = answer.get("error")
    message = error.get("message") if isinstance(error, dict) else error
    return " ".join(str(message or otherwise).split())


class RemoteContextFull(ContextFull):
    """A server says that the conversation is too long for it."""

    def __init__(self, said: str) -> None:
        RequestError.__init__(self, said)


def _error(answer: Mapping[str, Any], otherwise: str) -> RequestError:
    error, said = answer.get("error"), _said(answer, otherwise)
    codes = {str(error.get(key)) for key in ("code", "type")} if isinstance(error, dict) else set()
    if codes & {"context_length_exceeded", "exceed_context_size_error"}:
        return RemoteContextFull(said)
    return RequestError(said)


def _stats(timings: Any) -> Stats | None:
    """Our own account of an answer; None from other servers."""
    if not isinstance(timings, dict) or "decode_tokens" not in timings:
        return None
    return Stats(**{f.name: timings[f.name] for f in fields(Stats) if f.name in timings})


def _finish(reason: str | None) -> Finish | None:
    if not reason:
        return None
    return "length" if reason == "length" else "stop"
