"""Looking at an RPC worker before ggml does: ggml ends the process where this raises a sentence.

Speaks the first words of ggml's RPC protocol (ggml-rpc.cpp): HELLO, how many devices, their memory.
A worker serves one connection at a time; this one is closed before it returns.
"""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

from gguf_mtp.errors import LoadFailed, RequestError

__all__ = ["VERSION", "RpcWorker", "parse_endpoints", "probe_worker"]

VERSION = (7, 0)
"""RPC_PROTO_MAJOR_VERSION and the newest minor one that the pinned ggml talks to."""
TIMEOUT = 5.0
_HELLO, _COUNT, _MEMORY = 14, 15, 11  # enum rpc_cmd
_CAPABILITIES = 24  # RPC_CONN_CAPS_SIZE


class RpcWorker(NamedTuple):
    """`memory`: (free, total) bytes of each device that it lends."""

    endpoint: str
    memory: tuple[tuple[int, int], ...]


def parse_endpoints(text: str) -> tuple[str, ...]:
    """ "host:port,host:port". Raises `RequestError`."""
    endpoints = tuple(part.strip() for part in text.split(",") if part.strip())
    if not endpoints:
        raise RequestError("--rpc names no worker; write host:port")
    for endpoint in endpoints:
        host, _, port = endpoint.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise RequestError(f"{endpoint!r} is not a worker address; write host:port")
    if len(set(endpoints)) < len(endpoints):
        raise RequestError("--rpc names a worker twice")
    return endpoints


def probe_worker(endpoint: str, timeout: float = TIMEOUT) -> RpcWorker:
    """Says hello to the worker at "host:port" and asks what it lends. Raises `LoadFailed`."""
    host, _, port = endpoint.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout) as connection:
            connection.settimeout(timeout)
            return _ask(connection, endpoint)
    except TimeoutError:
        raise LoadFailed(
            f"the worker at {endpoint} does not answer: it is serving another run, or is not a "
            "gguf-mtp worker"
        ) from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise LoadFailed(f"no worker at {endpoint}: {reason}") from None


def _ask(connection: socket.socket, endpoint: str) -> RpcWorker:
    try:
        hello = _exchange(connection, _HELLO, bytes(_CAPABILITIES), 4 + _CAPABILITIES)
        major, minor = hello[0], hello[1]
        if major != VERSION[0] or minor > VERSION[1]:
            raise LoadFailed(
                f"the worker at {endpoint} speaks RPC {major}.{minor}, but this machine speaks "
                f"{VERSION[0]}.{VERSION[1]}; install the same gguf-mtp version on both"
            )
        (count,) = struct.unpack("<I", _exchange(connection, _COUNT, b"", 4))
        memory = []
        for device in range(count):
            raw = _exchange(connection, _MEMORY, struct.pack("<I", device), 16)
            memory.append(struct.unpack("<QQ", raw))
    except EOFError:
        raise LoadFailed(
            f"the server at {endpoint} is not a worker of this version: it closed the connection"
        ) from None
    if not memory:
        raise LoadFailed(f"the worker at {endpoint} lends no device")
    return RpcWorker(endpoint, tuple((free, total) for free, total in memory))


def _exchange(connection: socket.socket, command: int, data: bytes, n_answer: int) -> bytes:
    """One command: its number, a length, the data; the answer is a length and as many bytes."""
    connection.sendall(struct.pack("<BQ", command, len(data)) + data)
    (n,) = struct.unpack("<Q", _read(connection, 8))
    if n != n_answer:
        raise EOFError
    return _read(connection, n)


def _read(connection: socket.socket, n: int) -> bytes:
    data = b""
    while len(data) < n:
        part = connection.recv(n - len(data))
        if not part:
            raise EOFError
        data += part
    return data
