"""A plan's directives as the arrays that llama.cpp's parameters point to."""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp as L

from gguf_mtp.errors import LoadFailed
from gguf_mtp.llama.devices import buffer_type, handles
from gguf_mtp.offload.directives import LoadParams


class _Override(ctypes.Structure):
    """llama_model_tensor_buft_override, which the binding does not declare."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p))


class TensorOverrides:
    """Owns the arrays that `params` points to afterwards; it must outlive the model.

    Raises `LoadFailed` when a device of the plan is not there.
    """

    def __init__(self, params: Any, plan: LoadParams) -> None:
        there = handles()
        missing = [name for name in plan.devices if name not in there]
        if missing:
            raise LoadFailed(f"device {missing[0]} of the plan is no longer available")
        n, most = len(plan.devices), int(L.llama_max_devices())
        if n > most:
            raise LoadFailed(f"the plan has {n} devices, but llama.cpp supports at most {most}")
        # An empty list is not the same as none: it keeps llama.cpp from choosing devices itself.
        self._devices = (ctypes.c_void_p * (n + 1))(*[there[d] for d in plan.devices], None)
        self._split = (ctypes.c_float * most)(*map(float, plan.split))
        buffers = {name: buffer_type(name) for name in {d for _, d in plan.overrides}}
        self._overrides = (_Override * (len(plan.overrides) + 1))(
            *[_Override(pattern.encode(), buffers[d]) for pattern, d in plan.overrides]
        )
        params.n_gpu_layers = plan.n_gpu_layers
        params.devices = ctypes.addressof(self._devices)
        params.tensor_split = ctypes.cast(self._split, ctypes.POINTER(ctypes.c_float))
        if plan.overrides:
            params.tensor_buft_overrides = ctypes.addressof(self._overrides)
