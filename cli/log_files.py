"""Where a server writes what it does: request records and a trace, opened before anything loads."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from ..depth import AutoDepth
from ..errors import RequestError
from ..server.log_text import as_text
from ..session import Session
from ..telemetry.jsonlines import JsonLines, as_json
from ..telemetry.metrics import Metrics
from ..telemetry.trace import BEGIN, Trace
from .log_format import LogFormat


class Files(NamedTuple):
    """What was asked for; None where nothing is written."""

    log: JsonLines | None
    trace: JsonLines | None

    def n_lost(self) -> int:
        return sum(file.n_lost for file in self if file)


@contextmanager
def open_files(
    log: str, trace: Path | None, goes_on: bool, log_format: LogFormat = LogFormat.auto
) -> Iterator[Files]:
    """`log` is a path, "-" for standard output, or "off"; a log is added to, and a trace where it
    `goes_on`. Raises `GgufMtpError`."""
    is_text = log_format is LogFormat.text
    if log_format is LogFormat.auto:
        is_text = log == "-" and sys.stdout.isatty()
    form = as_text if is_text else as_json
    with ExitStack() as stack:
        if log not in ("off", "-"):
            _check_log(Path(log))
        if trace:
            _check_trace(trace)
        files = Files(
            log=None if log == "off" else JsonLines(None if log == "-" else Path(log), form=form),
            trace=JsonLines(trace, keeps=goes_on) if trace else None,
        )
        for file in files:
            if file:
                stack.callback(file.close)
        yield files


def _check_log(path: Path) -> None:
    """Lines are not put behind what is no text, such as a model."""
    if b"\0" in _beginning(path):
        raise RequestError(f"--log {path} already exists and is not a text file; give another name")


def _check_trace(path: Path) -> None:
    """A trace begins anew, so that what stood in its place is lost: only another may."""
    begin = _beginning(path)
    if begin and not begin.startswith(BEGIN.encode()):
        raise RequestError(f"--trace {path} already exists and is not a trace; give another name")


def _beginning(path: Path) -> bytes:
    """Of a regular file; nothing where there is none, or it cannot be read."""
    try:
        if path.is_file():
            with path.open("rb") as file:
                return file.read(4096)
    except OSError:
        pass
    return b""


def watch(session: Session, files: Files) -> Metrics:
    """Metrics of the session's engine; its trace goes to `files`."""
    engine = session.engine
    depth = engine.depth
    metrics = Metrics(depth.report if isinstance(depth, AutoDepth) else None)
    engine.observers.add(metrics)
    if files.trace:
        about = {
            "model": session.facts.name or Path(session.facts.path).name,
            "n_ctx": engine.limits.n_ctx,
            "n_seq": engine.limits.n_seq,
            "depth_max": depth.n_max if engine.is_drafting else 0,
        }
        engine.observers.add(Trace(files.trace.write, about))
    return metrics
