"""The devices that llama.cpp can put layers on."""

from __future__ import annotations

import ctypes

import llama_cpp as L
import llama_cpp._ggml as llama_cpp_ggml


def accelerators() -> list[str]:
    """Names of the devices besides the CPU that layers can lie on, as llama.cpp numbers them."""
    ggml = llama_cpp_ggml.libggml
    ggml.ggml_backend_dev_count.restype = ctypes.c_size_t
    ggml.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
    for name, result in (
        ("get", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("type", ctypes.c_int),
    ):
        getattr(ggml, f"ggml_backend_dev_{name}").restype = result
    for name in ("name", "type"):
        getattr(ggml, f"ggml_backend_dev_{name}").argtypes = [ctypes.c_void_p]
    L.llama_backend_init()
    devices = map(ggml.ggml_backend_dev_get, range(ggml.ggml_backend_dev_count()))
    gpu, integrated = 1, 2  # enum ggml_backend_dev_type
    return [
        ggml.ggml_backend_dev_name(device).decode(errors="replace")
        for device in devices
        if ggml.ggml_backend_dev_type(device) in (gpu, integrated)
    ]
