"""How a server listens, runs and ends. It knows no options and no endpoints."""

from __future__ import annotations

import errno
import ipaddress
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    import uvicorn

    from ..server.engine_thread import EngineThread

SHUTTING_DOWN = "the server is shutting down"
BACKLOG = 2048
LAST_WORDS_S = 2.0
"""How long clients may take to read that their answers have ended."""
STOP_S = 60.0
"""How long the engine's thread may need to end: at most one round."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, before anything is loaded. Raises `GgufMtpError` in one sentence."""
    from ..errors import GgufMtpError

    if not host:
        raise GgufMtpError("--host is empty; 0.0.0.0 listens on every address")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because asyncio sets TCP_NODELAY only where it is: without, the kernel
    # holds every second packet back for 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if os.name == "posix":  # elsewhere it lets two servers have one port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        return listener
    except (OSError, OverflowError) as error:
        listener.close()
        where = f"{host} port {port}"
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise GgufMtpError(f"{where} is in use; choose another with --port") from None
        reason = getattr(error, "strerror", None) or error
        raise GgufMtpError(f"cannot listen on {where}: {reason}") from None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def http_server(app: object) -> uvicorn.Server:
    import uvicorn

    from ..server.header_timeout import HeaderTimeoutProtocol

    return uvicorn.Server(
        uvicorn.Config(
            app,  # type: ignore[arg-type]
            http=HeaderTimeoutProtocol,
            interface="asgi3",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws="none",  # the log would tell of every attempt
        )
    )


@contextmanager
def signals_to_server() -> Iterator[None]:
    """Within it Ctrl+C and SIGTERM only make the server stop: uvicorn takes them, and raises them
    once more when it has ended, when they must not end the process before everything is closed."""
    taken = {s: signal.signal(s, lambda *_: None) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in taken.items():
            signal.signal(number, handler)


async def run_until_signal(
    server: uvicorn.Server, listener: socket.socket, worker: EngineThread, grace: float
) -> bool:
    """Serves until a signal; then answers may end within `grace` seconds, and the rest are told.

    Ends too when the engine's thread has died, for whoever starts servers can start another; this
    is what it returns.
    """
    import asyncio

    serving = asyncio.ensure_future(server.serve([listener]))
    while not server.should_exit and not serving.done() and worker.is_alive:
        await asyncio.sleep(0.1)
    has_died = not worker.is_alive
    server.should_exit = True
    await asyncio.wait((serving,), timeout=grace)
    if not serving.done():
        await asyncio.to_thread(worker.stop, SHUTTING_DOWN, STOP_S)
        await asyncio.wait((serving,), timeout=LAST_WORDS_S)
        for connection in list(server.server_state.connections):
            if connection.transport:  # who reads nothing, or sends nothing, is not waited for
                connection.transport.abort()
    await serving
    return has_died


def end_engine(worker: EngineThread) -> None:
    """Ends the engine's thread. While it decodes, the model must not be freed under it: then the
    process ends as it is."""
    try:
        if worker.stop(SHUTTING_DOWN, STOP_S):
            return
        typer.echo(f"error: the engine did not stop within {STOP_S:.0f} s", err=True)
        os._exit(1)
    except KeyboardInterrupt:
        os._exit(130)


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"
