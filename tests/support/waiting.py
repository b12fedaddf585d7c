"""Waiting for what happens in another thread or process.

The bound is there so that a test that hangs ends; no machine is slow enough to come near it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 120.0


def wait_for(condition: Callable[[], object], every_s: float = 0.002) -> None:
    """Until `condition()` is true."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(every_s)
