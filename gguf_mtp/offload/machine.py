"""What a plan places things on: devices, and the memory beside the CPU.

Sizes are bytes; bandwidths are bytes a second and are what a prediction divides by. How a device is
found, and how its free memory is read, is not known here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from gguf_mtp.errors import RequestError

__all__ = ["CPU", "GIB", "Device", "Host", "parse_devices", "parse_host", "parse_size"]

CPU = "CPU"
"""The name of the place that is no device."""
GIB = 1 << 30
MARGIN = GIB
"""Device memory left free unless told otherwise: for the driver, the desktop, and what a library
allocates beside llama.cpp's buffers."""
DEVICE_BANDWIDTH = 800e9
"""Assumed of a card whose bandwidth was not given."""
HOST_BANDWIDTH = 60e9
"""Assumed of memory beside a CPU that was neither measured nor given."""


@dataclass(frozen=True, slots=True)
class Device:
    """Memory that layers can lie on beside the CPU's. `copies_experts`: large batches copy weights
    that lie with the CPU into the device's memory to compute there (op-offload). `is_remote`: it is
    another machine's."""

    name: str
    free: int
    bandwidth: float = DEVICE_BANDWIDTH
    margin: int = MARGIN
    copies_experts: bool = True
    is_remote: bool = False

    @property
    def budget(self) -> int:
        """What a plan may fill."""
        return max(self.free - self.margin, 0)


@dataclass(frozen=True, slots=True)
class Host:
    """The machine's own memory: `available` bytes (None: unknown), and its bandwidth."""

    available: int | None = None
    bandwidth: float = HOST_BANDWIDTH


def parse_size(text: str) -> int:
    """ "24G" -> bytes; K, M, G and T count in 1,024, and a bare number is bytes.

    Raises `RequestError`.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not found:
        raise RequestError(f"{text!r} is not a size; write 24G, 512M or a number of bytes")
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " "))


def parse_devices(text: str, margin: int = MARGIN) -> tuple[Device, ...]:
    """ "24G,48G@1000" -> devices GPU0 and GPU1, the second with 1,000 GB/s.

    An empty text or "0" is no device. Raises `RequestError`.
    """
    devices = []
    for i, part in enumerate(p for p in text.split(",") if p.strip()):
        size, bandwidth = _with_bandwidth(part, DEVICE_BANDWIDTH)
        if size:
            devices.append(Device(f"GPU{i}", size, bandwidth, margin))
    return tuple(devices)


def parse_host(text: str) -> Host:
    """ "256G" or "256G@80". Raises `RequestError`."""
    size, bandwidth = _with_bandwidth(text, HOST_BANDWIDTH)
    return Host(size, bandwidth)


def _with_bandwidth(text: str, assumed: float) -> tuple[int, float]:
    size, at, bandwidth = text.partition("@")
    if not at:
        return parse_size(size), assumed
    try:
        per_second = float(bandwidth.lower().removesuffix("b/s").removesuffix("g")) * 1e9
    except ValueError:
        per_second = 0.0
    if not 0 < per_second < float("inf"):
        raise RequestError(f"{bandwidth!r} is not a bandwidth; write 24G@1000 for 1,000 GB/s")
    return parse_size(size), per_second


def names(devices: Sequence[Device]) -> str:
    """For sentences: "GPU0, GPU1"."""
    return ", ".join(device.name for device in devices)
