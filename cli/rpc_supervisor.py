"""`gguf-mtp serve --rpc`: the port stays open while engines come and go behind it.

The whole server runs in a child process, on a port of its own; this one passes bytes between it and
the clients. When a worker is lost, ggml ends the child: answers that were running get a 503 that
names the worker (a stream an error event), new requests too, until every worker answers again and
another child has loaded the model. It reads no HTTP but what it needs to end an answer properly.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from .rpc_child import answers, command, environment, is_abort, what_was_lost

__all__ = ["supervise"]

RETRY_S = 5.0
"""How long to wait when the engine could not be started again."""
POLL_S = 1.0
"""How often a lost worker is looked for."""
HEAD = 64 * 1024
LOADING = "the engine is loading"


@dataclass(eq=False)
class _Exchange:
    """What the proxy knows of one client's connection: whether an answer is owed, has begun, and is
    a stream of events."""

    writer: asyncio.StreamWriter
    is_owed: bool = False
    has_begun: bool = False
    is_stream: bool = False
    tail: bytes = field(default=b"")

    def asked(self) -> None:
        if not self.is_owed:
            self.is_owed, self.has_begun, self.is_stream = True, False, False

    def answered(self, data: bytes) -> None:
        if not self.has_begun:
            head = data[:HEAD].lower()
            self.has_begun, self.is_stream = True, b"content-type: text/event-stream" in head
        self.tail = (self.tail + data)[-5:]
        if not self.is_stream or self.tail == b"0\r\n\r\n":
            self.is_owed = False

    def fail(self, why: str) -> None:
        """Ends what is owed: an error event in a stream, else a 503."""
        if self.is_owed and self.has_begun and self.is_stream:
            event = b"data: " + json.dumps(_error(why)).encode() + b"\n\n"
            self.writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(event), event))
        elif self.is_owed:
            self.writer.write(_unavailable(why))
        self.is_owed = False
        self.writer.close()


def supervise(listener: socket.socket, endpoints: Sequence[str], url: str) -> int:
    """Serves until a signal; the exit code."""
    return asyncio.run(_Supervisor(endpoints, url).run(listener))


class _Supervisor:
    def __init__(self, endpoints: Sequence[str], url: str) -> None:
        self._endpoints, self._url = endpoints, url
        self._child: asyncio.subprocess.Process | None = None
        self._port: int | None = None
        self._why = LOADING
        self._exchanges: set[_Exchange] = set()
        self._stopping = asyncio.Event()
        self._reading: list[asyncio.Future[None]] = []

    async def run(self, listener: socket.socket) -> int:
        loop = asyncio.get_running_loop()
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(each, self._stopping.set)
        server: asyncio.Server | None = None
        try:
            while True:
                if not await self._start(is_first=server is None):
                    if server is None:
                        return 1  # it has said why
                    self._why = "the engine failed to restart"
                    if await self._stopped_within(RETRY_S):
                        return 0
                    continue
                if server is None:
                    server = await asyncio.start_server(self._client, sock=listener, limit=HEAD)
                    _say(f"listening on {self._url}")
                if await self._ended_or_stopped():
                    return await self._stop()
                assert self._child is not None
                number = -(self._child.returncode or 0)
                self._lost(await asyncio.to_thread(what_was_lost, self._endpoints, number))
                if not await self._workers_back():
                    return 0
        finally:
            if server is not None:
                server.close()

    async def _start(self, is_first: bool) -> bool:
        """Starts a child; whether it listens. What it says meanwhile goes on to our own output."""
        self._why = LOADING
        goes_on = () if is_first else ("--trace-goes-on",)
        self._child = await asyncio.create_subprocess_exec(
            *command("--host", "127.0.0.1", "--port", "0", *goes_on),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment(),
            start_new_session=True,  # Ctrl+C comes to us, who tell it
        )
        assert self._child.stdout is not None
        assert self._child.stderr is not None
        self._reading = [asyncio.ensure_future(_errors(self._child.stderr))]
        async for raw in self._child.stdout:
            found = re.match(r"listening on http://\S+:(\d+)/v1", raw.decode(errors="replace"))
            if found:
                self._port = int(found[1])
                self._reading.append(asyncio.ensure_future(_lines(self._child.stdout)))
                return True
            _say(raw.decode(errors="replace").rstrip())
        await self._child.wait()
        return False

    async def _ended_or_stopped(self) -> bool:
        """Waits for either; whether we shall stop."""
        assert self._child is not None
        ended = asyncio.ensure_future(self._child.wait())
        stopped = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait((ended, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        return self._stopping.is_set()

    async def _stop(self) -> int:
        assert self._child is not None
        with suppress(ProcessLookupError):
            self._child.send_signal(signal.SIGTERM)
        return await self._child.wait()

    def _lost(self, why: str) -> None:
        self._port, self._why = None, why
        print(f"error: {why}; waiting for it to come back", file=sys.stderr, flush=True)
        for exchange in list(self._exchanges):
            exchange.fail(why)

    async def _workers_back(self) -> bool:
        """Waits until every worker answers; False when we shall stop instead."""
        while not self._stopping.is_set():
            back = await asyncio.to_thread(lambda: all(map(answers, self._endpoints)))
            if back:
                return True
            await self._stopped_within(POLL_S)
        return False

    async def _stopped_within(self, seconds: float) -> bool:
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)
        return self._stopping.is_set()

    # -- clients -----------------------------------------------------------------------------------

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        exchange = _Exchange(writer)
        try:
            if self._port is None:
                await _head(reader)
                writer.write(_unavailable(self._why))
                await writer.drain()
                return
            inner, outer = await asyncio.open_connection("127.0.0.1", self._port)
            self._exchanges.add(exchange)
            up = asyncio.ensure_future(_pump_up(reader, outer, exchange))
            try:
                await self._pump_down(inner, exchange)
            finally:
                up.cancel()
                outer.close()
        except OSError:
            exchange.is_owed = True
            exchange.fail(self._why)
        finally:
            self._exchanges.discard(exchange)
            writer.close()

    async def _pump_down(self, inner: asyncio.StreamReader, exchange: _Exchange) -> None:
        with suppress(ConnectionError):
            while data := await inner.read(HEAD):
                exchange.answered(data)
                exchange.writer.write(data)
                await exchange.writer.drain()
        if exchange.is_owed:  # the child has died, or will have in a moment: say which worker
            for _ in range(100):
                if self._port is None:
                    return  # `_lost` has ended the answer
                await asyncio.sleep(0.05)
            exchange.fail("the engine stopped before the answer was complete")


async def _pump_up(
    reader: asyncio.StreamReader, outer: asyncio.StreamWriter, exchange: _Exchange
) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(HEAD):
            exchange.asked()
            outer.write(data)
            await outer.drain()
        outer.close()  # a client that leaves stops its answer


async def _head(reader: asyncio.StreamReader) -> None:
    with suppress(asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.TimeoutError):
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)


def _error(why: str) -> dict[str, dict[str, object]]:
    return {"error": {"message": why, "type": "server_error", "param": None, "code": 503}}


def _unavailable(why: str) -> bytes:
    body = json.dumps(_error(why)).encode()
    return (
        b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n"
        b"retry-after: 5\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
    ) + body


def _say(line: str) -> None:
    print(line, flush=True)


async def _lines(stream: asyncio.StreamReader) -> None:
    async for raw in stream:
        _say(raw.decode(errors="replace").rstrip())


async def _errors(stream: asyncio.StreamReader) -> None:
    """Passes the child's sentences on; what ggml prints when it aborts is left out."""
    aborted = False
    async for raw in stream:
        line = raw.decode(errors="replace")
        aborted = aborted or is_abort(line)
        if not aborted:
            print(line, end="", file=sys.stderr, flush=True)
