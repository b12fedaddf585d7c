"""What all tests share: where a worker of pytest-xdist runs."""

from __future__ import annotations

import os


def pytest_configure() -> None:
    """Each worker has a core of its own, and so one thread for llama.cpp: two that share two cores
    with two threads each wait for one another at every layer."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if worker.isdigit() and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker) % len(cores)]})
