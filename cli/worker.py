"""`gguf-mtp worker`: lends this machine's devices to others, with ggml's own RPC server."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from ..engine.config import MAX_THREADS

__all__ = ["worker"]


def worker(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free port.")] = 50052,
    device: Annotated[
        str | None,
        typer.Option(
            "-dev",
            "--device",
            metavar="NAMES",
            help="Devices to lend, comma-separated; CPU lends this machine's memory.",
            show_default="all GPUs, or the CPU if there are none",
        ),
    ] = None,
    mem: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory to lend on each device.", show_default="all"),
    ] = None,
    threads: Annotated[
        int,
        typer.Option(
            "-t", "--threads", min=0, max=MAX_THREADS, help="Number of threads; 0: all cores."
        ),
    ] = 0,
    allow_remote: Annotated[
        bool,
        typer.Option("--allow-remote", help="Allow unprotected access from other machines."),
    ] = False,
) -> None:
    """Lend this machine's memory and devices to gguf-mtp on another machine (use --rpc there).

    ggml's RPC has no authentication and no encryption. Anyone who can reach the port
    can take over the process.
    """
    from ..errors import RequestError
    from ..llama.rpc import serve
    from ..offload import parse_size
    from .http_server import is_loopback, listen

    if not is_loopback(host) and not allow_remote:
        raise RequestError(
            f"{host} can be reached by other machines, and ggml's RPC has no authentication: use "
            "--allow-remote, but only on a network you trust"
        )
    names = _devices(device)
    limit = parse_size(mem) if mem is not None else None
    if limit == 0:
        raise RequestError(f"--mem {mem} lends nothing")
    with listen(host, port) as listener:
        port = listener.getsockname()[1]
    where = f"{host}:{port}"
    if not is_loopback(host):
        typer.echo(f"warning: anyone who can reach {where} can use and crash this worker", err=True)
    print(f"lending {', '.join(names)} at {where}", flush=True)
    serve(where, names, threads or os.cpu_count() or 1, limit)
    raise RequestError(f"ggml's RPC server at {where} ended")


def _devices(wanted: str | None) -> list[str]:
    from ..errors import RequestError
    from ..llama.rpc import lendable
    from ..offload import CPU

    there = lendable()
    if wanted is None:
        return [name for name in there if name != CPU] or [CPU]
    names = [part.strip() for part in wanted.split(",") if part.strip()]
    for name in names:
        if name not in there:
            raise RequestError(f"--device {name} does not exist; available: {', '.join(there)}")
    if not names:
        raise RequestError("--device is empty; name at least one device to lend")
    return names
