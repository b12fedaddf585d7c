"""Modules of this package that run in a process of their own, because what they do may end one."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

__all__ = ["bound_memory", "run_module", "start_module"]


def _command(module: str) -> list[str]:
    return [sys.executable, "-m", module]


def _where() -> str:
    """Not the current folder: Python looks there for modules first, and it may be a stranger's."""
    return Path(sys.executable).anchor or "/"


def _environment() -> dict[str, str]:
    """Ours, without ggml's habit of calling a debugger when it aborts."""
    return os.environ | {"GGML_NO_BACKTRACE": "1"}


def run_module(module: str, given: bytes, seconds: float) -> subprocess.CompletedProcess[bytes]:
    """Runs `python -m module` to its end. Raises as `subprocess.run`; paths must be absolute."""
    return subprocess.run(
        _command(module),
        input=given,
        capture_output=True,
        timeout=seconds,
        cwd=_where(),
        env=_environment(),
        check=False,
    )


def start_module(module: str) -> subprocess.Popen[bytes]:
    """Starts `python -m module`, which reads and writes lines and ends with its input."""
    return subprocess.Popen(
        _command(module),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=_where(),
        env=_environment(),
        start_new_session=True,  # Ctrl+C is the parent's
    )


def bound_memory(limit: str, n_bytes: int) -> None:
    """Within a child: `limit` is RLIMIT_AS or RLIMIT_DATA. Nothing where there are none."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(getattr(resource, limit), (n_bytes, n_bytes))
