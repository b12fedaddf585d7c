"""What this machine's own memory can give: how much is available, and how fast it is read.

Asks the operating system and a clock; knows no device beside the CPU.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gguf_mtp.offload.machine import Host

__all__ = ["available", "bandwidth", "host"]

_BLOCK = 64 << 20
_SECONDS = 0.1


def host() -> Host:
    """This machine, its bandwidth measured."""
    return Host(available(), bandwidth())


def available(
    meminfo: Path = Path("/proc/meminfo"), limit: Path = Path("/sys/fs/cgroup/memory.max")
) -> int | None:
    """Bytes of memory that a process could take without pushing others out; None: unknown.

    Linux's own estimate counts what the page cache would give back; elsewhere all of the memory. A
    container may have less.
    """
    found = _mem_available(meminfo)
    try:
        allowed = int(limit.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return found
    return allowed if found is None else min(found, allowed)


def _mem_available(meminfo: Path) -> int | None:
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def bandwidth(n_threads: int | None = None) -> float:
    """Bytes a second that threads on all usable cores read together, over a tenth of a second."""
    n = n_threads or (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    blocks = [np.ones(_BLOCK // 8) for _ in range(n)]

    def read(block: NDArray[np.float64]) -> float:
        end, n_bytes, start = time.perf_counter() + _SECONDS, 0, time.perf_counter()
        while time.perf_counter() < end:
            block.max()
            n_bytes += block.nbytes
        return n_bytes / (time.perf_counter() - start)

    with ThreadPoolExecutor(n) as pool:
        return sum(pool.map(read, blocks))
