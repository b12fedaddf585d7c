"""ggml's RPC backend: other machines' devices, and this machine's lent to others.

ggml ends the process when a worker is lost, unreachable or of another version: look at it first
(`rpc.look`), and run what must survive it in a child process.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp as L

from gguf_mtp.errors import LoadFailed
from gguf_mtp.llama.devices import free_memory, ggml, handles
from gguf_mtp.offload.machine import CPU

__all__ = ["connect", "is_built", "lendable", "serve"]

_MISSING = (
    "this llama-cpp-python was built without ggml's RPC backend; build it with "
    'CMAKE_ARGS="-DGGML_RPC=ON"'
)
_GET_MEMORY = 2  # index of ggml_backend_device_i::get_memory among the struct's pointers
_MEMORY = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)
)


def is_built() -> bool:
    """Whether this llama.cpp has the backend."""
    try:
        _rpc("ggml_backend_rpc_start_server", None)
    except LoadFailed:
        return False
    return True


def connect(endpoint: str) -> None:
    """Registers the devices of the worker at "host:port" as RPC0, RPC1, ... in order.

    Raises `LoadFailed` when this build has no RPC, or the worker lends nothing.
    """
    L.llama_backend_init()
    add = _rpc("ggml_backend_rpc_add_server", ctypes.c_void_p, ctypes.c_char_p)
    registry = add(endpoint.encode())
    if not registry:
        raise LoadFailed(f"the worker at {endpoint} lends no device")
    ggml("ggml_backend_register", None, ctypes.c_void_p)(registry)


def lendable() -> dict[str, int]:
    """ggml's handles of this machine's devices by name, the CPU last."""
    L.llama_backend_init()
    by_type = ggml("ggml_backend_dev_by_type", ctypes.c_void_p, ctypes.c_int)
    return {**handles(), CPU: by_type(0)}


def serve(endpoint: str, devices: Sequence[str], n_threads: int, limit: int | None) -> None:
    """Lends devices at "host:port" until the process ends, with one client at a time.

    `limit`: bytes of memory to lend of each device, in place of what it says itself.
    """
    start = _rpc(
        "ggml_backend_rpc_start_server",
        None,
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.c_void_p,
    )
    there = lendable()
    array = (ctypes.c_void_p * len(devices))(*[there[name] for name in devices])
    kept = [_limit(there[name], name, limit) for name in devices] if limit is not None else []
    start(endpoint.encode(), None, n_threads, len(devices), ctypes.addressof(array))
    del kept


def _limit(handle: int, name: str, limit: int) -> Any:
    """Makes a device say that it has `limit` bytes: the RPC server has no limit of its own, so the
    device's table of functions, its first field, gets another answer. What of the limit is taken
    is reckoned from this process's memory (CPU), or from the device's own answer."""
    table = (ctypes.c_void_p * (_GET_MEMORY + 1)).from_address(handle)
    before = resident() if name == CPU else free_memory(handle)
    own = _MEMORY(table[_GET_MEMORY] or 0)

    def say(device: int, free: Any, total: Any) -> None:
        if name == CPU:
            taken = resident() - before
        else:
            own(device, free, total)
            taken = before - free[0]
        total[0], free[0] = limit, max(limit - max(taken, 0), 0)

    callback = _MEMORY(say)
    table[_GET_MEMORY] = ctypes.cast(callback, ctypes.c_void_p)
    return callback


def resident() -> int:
    """Bytes of memory that this process holds; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _rpc(name: str, result: Any, *arguments: Any) -> Any:
    try:
        return ggml(name, result, *arguments)
    except AttributeError:
        raise LoadFailed(_MISSING) from None
