"""Where a model lies: on devices as far as their memory goes, the rest with the CPU.

Everything here is pure: header facts, contexts and devices in, an `OffloadPlan` out, with what it
predicts and how it is told to llama.cpp. It finds no devices and loads nothing.
"""

from __future__ import annotations

from gguf_mtp.offload.buffers import Contexts
from gguf_mtp.offload.fit import fit
from gguf_mtp.offload.machine import CPU, Device, Host, parse_devices, parse_host, parse_size
from gguf_mtp.offload.parts import Subject
from gguf_mtp.offload.plan import Machine, OffloadPlan, Placed
from gguf_mtp.offload.predict import Prediction, predict

__all__ = [
    "CPU",
    "Contexts",
    "Device",
    "Host",
    "Machine",
    "OffloadPlan",
    "Placed",
    "Prediction",
    "Subject",
    "fit",
    "parse_devices",
    "parse_host",
    "parse_size",
    "predict",
]
