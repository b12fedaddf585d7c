"""The devices that llama.cpp can put layers on, and what they say of their memory.

Symbols are looked up through libllama, not by a library's file name: a second copy of ggml would
have a registry of its own, in which llama.cpp sees nothing.
"""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp as L
from llama_cpp import llama_cpp as binding
from llama_cpp._ggml import libggml

from gguf_mtp.offload.machine import MARGIN, Device

_GPU, _INTEGRATED = 1, 2  # enum ggml_backend_dev_type


def ggml(name: str, result: Any, *arguments: Any) -> Any:
    """A function of the ggml that llama.cpp itself uses. Raises `AttributeError` if it has none."""
    try:
        function = getattr(binding._lib, name)
    except AttributeError:  # Windows looks into the named library alone
        function = getattr(libggml, name)
    function.restype, function.argtypes = result, list(arguments)
    return function


def handles() -> dict[str, int]:
    """ggml's handle of each device besides the CPU by name, as llama.cpp orders them: other
    machines first, then cards, integrated ones only where there is no other."""
    L.llama_backend_init()
    get = ggml("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
    kind = ggml("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)
    found = [get(i) for i in range(ggml("ggml_backend_dev_count", ctypes.c_size_t)())]
    cards = [h for h in found if kind(h) == _GPU]
    others = [h for h in found if kind(h) == _INTEGRATED]
    local = [h for h in cards if not is_remote(name_of(h))] or others
    return {name_of(h): h for h in [*(h for h in cards if is_remote(name_of(h))), *local]}


def name_of(handle: int) -> str:
    name = ggml("ggml_backend_dev_name", ctypes.c_char_p, ctypes.c_void_p)
    return str(name(handle).decode(errors="replace"))


def is_remote(name: str) -> bool:
    """Whether a device is another machine's, by the name that ggml's RPC backend gives it."""
    return name.startswith("RPC")


def devices(margin: int = MARGIN) -> tuple[Device, ...]:
    """This machine's devices besides the CPU with their free memory, each to keep `margin` bytes
    back. Those of workers are left out: asking a lost one ends the process."""
    return tuple(
        Device(name, free_memory(handle), margin=margin)
        for name, handle in handles().items()
        if not is_remote(name)
    )


def lent(endpoint: str) -> list[str]:
    """Names of the devices of a worker that this process has been connected to, in order."""
    of = ggml("ggml_backend_dev_description", ctypes.c_char_p, ctypes.c_void_p)
    return [
        name
        for name, handle in handles().items()
        if is_remote(name) and of(handle) == endpoint.encode()
    ]


def free_memory(handle: int) -> int:
    memory = ggml(
        "ggml_backend_dev_memory",
        None,
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_size_t),
        ctypes.POINTER(ctypes.c_size_t),
    )
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    memory(handle, ctypes.byref(free), ctypes.byref(total))
    return int(free.value)


def buffer_type(name: str) -> int:
    """ggml's buffer type of a device by name, of the CPU when it is none of them."""
    handle = handles().get(name)
    if handle is None:
        return int(ggml("ggml_backend_cpu_buffer_type", ctypes.c_void_p)())
    of = ggml("ggml_backend_dev_buffer_type", ctypes.c_void_p, ctypes.c_void_p)
    return int(of(handle))


def accelerators() -> list[str]:
    """Names of the devices besides the CPU that layers can lie on."""
    return list(handles())
