"""One HTTP request's answers, carried from the worker's thread to the event loop.

Closing an exchange cancels what is still unfinished, so a client that leaves costs nothing more.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable

from starlette.requests import Request
from starlette.types import Receive

from gguf_mtp.answers.parse import AnswerEvent, AnswerParser, Delta, End, Failure
from gguf_mtp.server.access_log import LogEntry
from gguf_mtp.server.engine_thread import AnswerJob, EngineThread, Ticket
from gguf_mtp.server.error_responses import problem_of
from gguf_mtp.server.plan import AnswerPlan
from gguf_mtp.server.responses import ResponseChoice, Responses, sse

__all__ = ["RequestStream", "collect", "collect_unless_gone", "stream", "until_gone"]

COMMENT = b": reading the prompt\n\n"
DONE = b"data: [DONE]\n\n"


class RequestStream:
    """Asks the worker for all choices of a plan. A context manager; made on the event loop. `entry`
    is told what becomes of them. What nobody reads before it is whole comes with its end: the loop
    is not woken for it, which would hold up llama.cpp's threads.

    Raises `Unavailable` when the queue is full, and `RequestError` for stop strings that are none.
    """

    def __init__(self, worker: EngineThread, plan: AnswerPlan, entry: LogEntry) -> None:
        self.n_choices = plan.n_choices
        self._worker, self._entry = worker, entry
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Queue[tuple[int, AnswerEvent]] = asyncio.Queue()
        self._n_open = plan.n_choices
        self._is_stream = plan.stream
        index = 0
        jobs: list[AnswerJob] = []
        for prompt in plan.prompts:
            for params in plan.params:
                following = plan.constrain()
                options = dataclasses.replace(plan.options, constraint=following)
                reader = AnswerParser(plan.parsing, self._teller(index), following)
                jobs.append(AnswerJob(reader, prompt, params, plan.max_tokens, options))
                index += 1
        self._tickets: list[Ticket] = worker.submit(jobs)
        entry.begin(plan)

    async def news(self, timeout: float | None) -> tuple[int, AnswerEvent] | None:
        """The next news with its choice; None when none came for `timeout` seconds."""
        try:
            index, news = await asyncio.wait_for(self._news.get(), timeout)
        except asyncio.TimeoutError:  # in Python 3.10 it is no TimeoutError
            return None
        if not isinstance(news, Delta):
            self._n_open -= 1
        return index, news

    @property
    def is_over(self) -> bool:
        return self._n_open == 0

    def __enter__(self) -> RequestStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancels what is unfinished."""
        if not self.is_over:
            self._entry.leave()
            self._worker.cancel(self._tickets)

    def _teller(self, index: int) -> Callable[[AnswerEvent], None]:
        """What a reader calls on the worker's thread."""

        held: list[tuple[int, AnswerEvent]] = []

        def tell(news: AnswerEvent) -> None:
            self._entry.see(index, news)
            held.append((index, news))
            if (self._is_stream or not isinstance(news, Delta)) and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._pass_on, held.copy())
                held.clear()

        return tell

    def _pass_on(self, held: list[tuple[int, AnswerEvent]]) -> None:
        for one in held:
            self._news.put_nowait(one)


async def collect(exchange: RequestStream) -> list[ResponseChoice]:
    """All choices, complete. Raises what a choice failed with."""
    choices = [ResponseChoice() for _ in range(exchange.n_choices)]
    while not exchange.is_over:
        found = await exchange.news(None)
        assert found
        index, news = found
        if isinstance(news, Failure):
            raise news.error
        if isinstance(news, End):
            choices[index].end = news
        else:
            choices[index].add(news)
    return choices


async def stream(
    exchange: RequestStream, plan: AnswerPlan, shapes: Responses, comment_s: float
) -> AsyncIterator[bytes]:
    """Server-sent events. A comment goes out whenever nothing else did for `comment_s` seconds
    (0: never), so that no proxy takes a long prompt for a dead connection."""
    opened: set[int] = set()
    ends: dict[int, End] = {}
    while not exchange.is_over:
        found = await exchange.news(comment_s or None)
        if found is None:
            yield COMMENT
            continue
        index, news = found
        if isinstance(news, Failure):
            exchange.close()
            yield sse(problem_of(news.error).body())
            yield DONE
            return
        if plan.is_chat and index not in opened:
            opened.add(index)
            yield sse(shapes.opening(index))
        if isinstance(news, End):
            ends[index] = news
            yield sse(shapes.end(index, news))
        else:
            yield sse(shapes.delta(index, news))
    if plan.include_usage:
        yield sse(shapes.usage([ends[i] for i in range(exchange.n_choices)]))
    yield DONE


async def collect_unless_gone(
    exchange: RequestStream, request: Request
) -> list[ResponseChoice] | None:
    """As `collect`; None when the client has left before."""
    choices = asyncio.ensure_future(collect(exchange))
    gone = asyncio.ensure_future(until_gone(request.receive))
    try:
        await asyncio.wait((choices, gone), return_when=asyncio.FIRST_COMPLETED)
        return choices.result() if choices.done() else None
    finally:
        choices.cancel()
        gone.cancel()


async def until_gone(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
