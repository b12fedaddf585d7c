"""How many processor cores a process may use."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path

__all__ = ["physical_cores"]


def physical_cores() -> int:
    """Cores this process may run on, hardware threads of one core counted once; on macOS those that
    are fast."""
    if not hasattr(os, "sched_getaffinity"):
        for name in ("hw.perflevel0.physicalcpu", "hw.physicalcpu"):
            with suppress(OSError, ValueError):
                asked = ["sysctl", "-n", name]
                return int(subprocess.run(asked, capture_output=True, text=True).stdout)
        return os.cpu_count() or 1
    usable = os.sched_getaffinity(0)
    siblings = set()
    for cpu in usable:
        try:
            path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
            siblings.add(path.read_text())
        except OSError:
            siblings.add(str(cpu))
    return len(siblings)
