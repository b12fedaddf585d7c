"""`gguf-mtp serve`: an OpenAI-compatible server on this machine."""

from __future__ import annotations

import dataclasses
import errno
import ipaddress
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from .options import ModelArgs
from .placement_options import PlacementArgs
from .sampling_options import SamplingArgs
from .spread import spread
from .text_files import read_text

if TYPE_CHECKING:
    import uvicorn

    from ..server.access import Access
    from ..server.engine_thread import EngineThread
    from ..server.plan import Served
    from ..session import Session

SHUTTING_DOWN = "the server is shutting down"
BACKLOG = 2048
LAST_WORDS_S = 2.0
"""How long clients may take to read that their answers have ended."""
STOP_S = 60.0
"""How long the engine's thread may need to end: at most one round."""


@dataclass(frozen=True)
class ServerArgs:
    """Where to listen, for whom, and how much at once."""

    PANEL: ClassVar[str] = "Server"

    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free port.")] = 8080
    parallel: Annotated[
        int, typer.Option("-np", "--parallel", min=1, help="Maximum concurrent requests.")
    ] = 4
    queue: Annotated[
        int, typer.Option(min=0, help="Maximum queued requests; further ones get a 503.")
    ] = 64
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="GGUF_MTP_API_KEY", help="API key that clients must send.", show_default=False
        ),
    ] = None
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="File whose first line is the API key.", show_default=False
        ),
    ] = None
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Host name clients may call this server by, such as ai.example.com; *: any. "
            "Addresses and local names always work; with an API key, so does every name.",
            show_default=False,
        ),
    ] = None
    any_model: Annotated[
        bool, typer.Option(help="Answer requests that name another model, too.")
    ] = True
    alias: Annotated[
        str | None,
        typer.Option("-a", "--alias", help="Model name shown to clients.", show_default=False),
    ] = None
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="Web origin that may use the server, such as http://localhost:3000; repeatable.",
        ),
    ] = None
    keep_alive: Annotated[
        float,
        typer.Option(min=0, help="Seconds of silence before a comment in a stream; 0: off."),
    ] = 10.0
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds that running answers may take at shutdown.")
    ] = 10.0
    log: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="Write a JSON line per request to FILE; -: to standard output; off: no log.",
        ),
    ] = "-"
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a JSON line per round to FILE; draw it with `gguf-mtp trace`.",
            show_default=False,
        ),
    ] = None
    trace_goes_on: Annotated[bool, typer.Option("--trace-goes-on", hidden=True)] = False

    def access(self) -> Access:
        """Raises `GgufMtpError` for a key file that cannot be read, or what is no web origin."""
        from ..server.access import Access, origin_of

        hosts = tuple(name.lower() for name in self.allowed_host or ())
        return Access(self._key(), tuple(map(origin_of, self.cors_origin or ())), hosts)

    def _key(self) -> str | None:
        from ..errors import GgufMtpError

        if self.api_key == "":
            raise typer.BadParameter("--api-key is empty; give a key, or leave the option out")
        file = self.api_key_file
        if file is None:
            return self.api_key
        if self.api_key is not None:
            raise typer.BadParameter("--api-key and --api-key-file cannot be combined")
        lines = read_text(file).splitlines()
        if not lines or not lines[0].strip():
            raise GgufMtpError(f"the first line of {file} is empty, but should be the API key")
        return lines[0].strip()


@spread
def serve(
    server_args: ServerArgs,
    model_args: ModelArgs,
    placement_args: PlacementArgs,
    sampling_args: SamplingArgs,
) -> None:
    """Serve a model to OpenAI clients, several requests at once."""
    import asyncio

    from ..errors import GgufMtpError
    from ..server.app import ServerOptions, create_app
    from ..server.engine_thread import EngineThread
    from .log_files import open_files, watch
    from .open_session import describe, open_session, placement
    from .rpc_child import end_with_parent
    from .rpc_supervisor import supervise

    args = server_args
    access = args.access()
    if args.alias == "":
        raise typer.BadParameter("--alias is empty; give a name, or leave the option out")
    if placement_args.rpc_child:
        end_with_parent()
    if workers := placement_args.distant():
        with listen(args.host, args.port) as listener:
            raise typer.Exit(supervise(listener, workers, _url(listener)))
    options = dataclasses.replace(model_args.load_options(placement_args), n_seq=args.parallel)
    with (
        listen(args.host, args.port) as listener,
        open_files(args.log, args.trace, args.trace_goes_on) as files,
        open_session(model_args, options=options) as session,
    ):
        worker = EngineThread(session.engine, args.parallel, args.queue)
        served = _served(session, args.alias, args.any_model, sampling_args)
        server_options = ServerOptions(
            access=access,
            comment_s=args.keep_alive,
            metrics=watch(session, files),
            write=files.log.write if files.log else lambda _: None,
            n_lost_lines=files.n_lost,
        )
        app = create_app(worker, served, server_options)
        typer.echo(f"{describe(session)}\n{placement(session)}")
        _greet(args, listener, access)
        worker.start()
        try:
            with _signals_to_server():
                has_died = asyncio.run(_run(_server(app), listener, worker, args.grace))
        finally:
            _end(worker)
    if has_died:
        raise GgufMtpError("the engine's thread died, so the server stopped")


def _greet(args: ServerArgs, listener: socket.socket, access: Access) -> None:
    url = _url(listener)
    page = url.removesuffix("v1")
    typer.echo(
        f"listening on {url}, up to {args.parallel} concurrent requests; open {page} in a browser"
    )
    if warning := exposure(args.host, access.api_key):
        typer.echo(f"warning: {warning}", err=True)


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


def exposure(host: str, api_key: str | None) -> str | None:
    """What to warn of when others can reach the server and nothing keeps them out."""
    if is_loopback(host) or api_key:
        return None
    return f"anyone who can reach {host} can use this server: set --api-key"


def _served(
    session: Session, alias: str | None, any_model: bool, sampling_args: SamplingArgs
) -> Served:
    from ..server.plan import Served

    facts = session.facts
    name = alias or facts.name or Path(facts.path).stem
    return Served(
        name=name.encode(errors="replace").decode(),  # a file's name may be no text
        any_model=any_model,
        model=session.text,
        defaults=sampling_args.over(session.sampling_defaults(), facts.n_vocab),
        max_tokens=None if sampling_args.max_tokens == -1 else sampling_args.max_tokens,
        created=int(time.time()),
        architecture=facts.architecture,
    )


def _server(app: object) -> uvicorn.Server:
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
def _signals_to_server() -> Iterator[None]:
    """Within it Ctrl+C and SIGTERM only make the server stop: uvicorn takes them, and raises them
    once more when it has ended, when they must not end the process before everything is closed."""
    taken = {s: signal.signal(s, lambda *_: None) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in taken.items():
            signal.signal(number, handler)


async def _run(
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


def _end(worker: EngineThread) -> None:
    """Ends the engine's thread. While it decodes, the model must not be freed under it: then the
    process ends as it is."""
    try:
        if worker.stop(SHUTTING_DOWN, STOP_S):
            return
        typer.echo(f"error: the engine did not stop within {STOP_S:.0f} s", err=True)
        os._exit(1)
    except KeyboardInterrupt:
        os._exit(130)


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"
