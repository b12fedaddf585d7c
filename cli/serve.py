"""`gguf-mtp serve`: an OpenAI-compatible server on this machine."""

from __future__ import annotations

import dataclasses
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from .http_server import (
    address_of,
    end_engine,
    http_server,
    is_loopback,
    listen,
    run_until_signal,
    signals_to_server,
)
from .log_format import LogFormat
from .options import ModelArgs
from .placement_options import PlacementArgs
from .sampling_options import SamplingArgs
from .spread import spread
from .text_files import read_text

if TYPE_CHECKING:
    import socket

    from ..server.access import Access
    from ..server.plan import Served
    from ..session import Session


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
            help="Write a line per request to FILE; -: to standard output; off: no log.",
        ),
    ] = "-"
    log_format: Annotated[
        LogFormat,
        typer.Option(help="Form of those lines; auto: text on a terminal, JSON elsewhere."),
    ] = LogFormat.auto
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
            raise typer.Exit(supervise(listener, workers, address_of(listener)))
    options = dataclasses.replace(model_args.load_options(placement_args), n_seq=args.parallel)
    with (
        listen(args.host, args.port) as listener,
        open_files(args.log, args.trace, args.trace_goes_on, args.log_format) as files,
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
            with signals_to_server():
                has_died = asyncio.run(
                    run_until_signal(http_server(app), listener, worker, args.grace)
                )
        finally:
            end_engine(worker)
    if has_died:
        raise GgufMtpError("the engine's thread died, so the server stopped")


def _greet(args: ServerArgs, listener: socket.socket, access: Access) -> None:
    url = address_of(listener)
    page = url.removesuffix("v1")
    typer.echo(
        f"listening on {url}, up to {args.parallel} concurrent requests; open {page} in a browser"
    )
    if warning := exposure(args.host, access.api_key):
        typer.echo(f"warning: {warning}", err=True)


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
