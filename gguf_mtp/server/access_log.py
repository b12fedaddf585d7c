"""What became of each HTTP request: one record for the log, and what the metrics count of it.

An ASGI application around all others, so that refusals are seen too. A request is over when its
response is sent and its last answer has ended, which after a client has left is later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gguf_mtp.answers.parse import AnswerEvent, Delta, End
from gguf_mtp.server.plan import AnswerPlan
from gguf_mtp.stats import Stats
from gguf_mtp.telemetry.metrics import Answered, Metrics

__all__ = ["AccessLog", "LogEntry", "Write", "entry_of"]

Write = Callable[[Mapping[str, Any]], None]

GONE = 499
"""The status of a request whose client left before it had a response, as nginx writes it."""
UNLOGGED = ("/health", "/metrics")
"""What machines ask all day."""
_KEY = "gguf_mtp.entry"


@dataclass(slots=True)
class ChoiceLog:
    """What a client was told of one choice; times on the clock of `time.perf_counter`."""

    first_at: float | None = None
    finish: str | None = None
    n_tokens: int = 0
    stats: Stats = field(default_factory=Stats)


class LogEntry:
    """One request's account. `see` is called on the engine's thread, the rest on the event loop."""

    def __init__(self, metrics: Metrics, write: Write, scope: Scope) -> None:
        self._metrics, self._write = metrics, write
        self._method, self._path = scope["method"], scope["path"]
        self._start, self._arrived = time.perf_counter(), datetime.now(timezone.utc)
        self._lock = threading.Lock()
        self._n_open = 0  # answers; below zero when one ends before all are counted
        self._choices: dict[int, ChoiceLog] = {}
        self._is_left = False
        self._seconds: float | None = None
        self._about: dict[str, Any] = {}
        self.status = GONE

    def begin(self, plan: AnswerPlan) -> None:
        """The plan's answers are being made."""
        self._about["stream"] = plan.stream
        self._about["prompt_tokens"] = sum(map(len, plan.prompts))
        with self._lock:
            self._n_open += plan.n_choices

    def name(self, id_: str) -> None:
        """The response's id."""
        self._about["id"] = id_

    def fail(self, message: str) -> None:
        """What the client was told instead of an answer."""
        self._about["error"] = message

    def leave(self) -> None:
        """The answers that are still being made will not be read."""
        self._is_left = True

    def see(self, index: int, news: AnswerEvent) -> None:
        """`news` is on its way to the client."""
        now = time.perf_counter()
        with self._lock:
            told = self._choices.setdefault(index, ChoiceLog())
            if isinstance(news, Delta):
                told.first_at = told.first_at or now
                return
        if isinstance(news, End):
            told.finish, told.n_tokens, told.stats = news.finish, news.n_tokens, news.stats
            if self._is_left:
                told.finish = "cancelled"
        else:
            told.finish = "error"
            self._about.setdefault("error", str(news.error))
        first_s = None if told.first_at is None else told.first_at - self._start
        self._metrics.answered(
            Answered(
                finish=told.finish,
                n_tokens=told.n_tokens,
                n_cached=told.stats.cached_tokens,
                first_s=first_s,
                seconds=now - self._start,
            )
        )
        with self._lock:
            self._n_open -= 1
            is_over = self._seconds is not None and self._n_open == 0
        if is_over:
            self._log()

    def close(self) -> None:
        """The response has been sent, as far as it ever will."""
        self._metrics.responded(self.status)
        with self._lock:
            self._seconds = time.perf_counter() - self._start
            is_over = self._n_open == 0
        if is_over:
            self._log()

    def _log(self) -> None:
        if self._path in UNLOGGED and self.status < 400:
            return
        record = {
            "time": self._arrived.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "method": self._method,
            "path": self._path,
            "status": self.status,
            "seconds": round(self._seconds or 0.0, 6),
        }
        self._write(record | self._about | self._answers())

    def _answers(self) -> dict[str, Any]:
        choices = [told for _, told in sorted(self._choices.items())]
        if not choices:
            return {}
        total = Stats()
        for told in choices:
            total += told.stats
        firsts = [told.first_at for told in choices if told.first_at is not None]
        return {
            "cached_tokens": total.cached_tokens,
            "answer_tokens": sum(told.n_tokens for told in choices),
            "finish": [told.finish for told in choices],
            "first_token_s": round(min(firsts) - self._start, 6) if firsts else None,
            "prefill_s": round(total.prefill_s, 6),
            "decode_s": round(total.decode_s, 6),
            "tokens_per_s": round(total.tokens_per_s, 3),
            "rounds": total.rounds,
            "drafted": total.drafted,
            "accepted": total.accepted,
        }


class AccessLog:
    """`app`, with a record of every request given to `write` and counted in `metrics`."""

    def __init__(self, app: ASGIApp, metrics: Metrics, write: Write) -> None:
        self._app, self._metrics, self._write = app, metrics, write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        entry = LogEntry(self._metrics, self._write, scope)

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry.status = message["status"]
            await send(message)

        try:
            await self._app({**scope, _KEY: entry}, receive, noting)
        finally:
            entry.close()


def entry_of(scope: Scope) -> LogEntry:
    """The account of the request that `scope` belongs to."""
    entry = scope[_KEY]
    assert isinstance(entry, LogEntry)
    return entry
