"""Where llama.cpp really put things: the device of each tensor, the bytes of each buffer type.

Both are C++ functions without a C interface, found by their mangled names (Itanium ABI: Linux,
macOS) and read by the layout of libstdc++'s map and of `ggml_tensor`; where they are missing the
answer is empty, and nobody is misled.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from gguf_mtp.llama.devices import ggml, name_of
from gguf_mtp.offload.machine import CPU

_BREAKDOWN = "_Z26llama_get_memory_breakdownPK13llama_context"
_GET_TENSOR = "_ZNK11llama_model10get_tensorEPKc"
_CPU_DEVICE = 0  # enum ggml_backend_dev_type
_BUFFER = 8  # offset of ggml_tensor::buffer


class BufferBreakdown(NamedTuple):
    """Bytes on one device: weights, cache and compute buffers of one context."""

    model: int
    context: int
    compute: int


def places(model: Any, names: Iterable[str]) -> dict[str, str]:
    """The device of each tensor by name, "CPU" for all of the CPU's buffers; {} if unknown."""
    try:
        get = ggml(_GET_TENSOR, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
    except AttributeError:
        return {}
    type_of = ggml("ggml_backend_buffer_get_type", ctypes.c_void_p, ctypes.c_void_p)
    found = {}
    for name in names:
        tensor = get(ctypes.cast(model, ctypes.c_void_p), name.encode())
        buffer = ctypes.c_void_p.from_address(tensor + _BUFFER).value if tensor else None
        if buffer:
            found[name] = _device_of(type_of(buffer))
    return found


def breakdown(context: Any) -> dict[str, BufferBreakdown]:
    """What a context and its model take on each device; {} where llama.cpp cannot be asked.

    With a model loaded by `no_alloc` it is what they would take.
    """
    if not sys.platform.startswith("linux"):
        return {}
    try:
        ask = ggml(_BREAKDOWN, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    except AttributeError:
        return {}
    # A std::map of libstdc++ returned by value: the caller gives room for its 48 bytes, of which
    # word 2 is the root and word 5 the count. Its few nodes are not freed.
    room = (ctypes.c_uint64 * 6)()
    ask(ctypes.addressof(room), ctypes.cast(context, ctypes.c_void_p))
    found: dict[str, BufferBreakdown] = {}
    for buffer_type, memory in _nodes(room[2]):
        device = _device_of(buffer_type)
        so_far = found.get(device, BufferBreakdown(0, 0, 0))
        found[device] = BufferBreakdown(*(a + b for a, b in zip(so_far, memory, strict=True)))
    return found


def _nodes(address: int) -> Iterator[tuple[int, BufferBreakdown]]:
    """In order: words of a node are color, parent, left, right, key and the three sums."""
    if not address:
        return
    words = (ctypes.c_uint64 * 8).from_address(address)
    yield from _nodes(words[2])
    yield words[4], BufferBreakdown(words[5], words[6], words[7])
    yield from _nodes(words[3])


def _device_of(buffer_type: int) -> str:
    handle = ggml("ggml_backend_buft_get_device", ctypes.c_void_p, ctypes.c_void_p)(buffer_type)
    kind = ggml("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)
    if not handle or kind(handle) == _CPU_DEVICE:
        return CPU
    is_host = ggml("ggml_backend_buft_is_host", ctypes.c_bool, ctypes.c_void_p)
    return CPU if is_host(buffer_type) else name_of(handle)
