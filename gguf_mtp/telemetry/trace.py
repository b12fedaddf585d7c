"""Every round of an engine as a line of JSON, and such a file read back.

The first line says what was traced; then comes one line for each decode of the target, and one
for each time the engine had to do with less than it wanted. An engine that was started again goes
on with a first line of its own. Knows no terminal and no plots.
"""

from __future__ import annotations

import calendar
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from gguf_mtp.engine.observers import EngineLoad, Fallback, RoundReport, SequenceReport
from gguf_mtp.errors import GgufMtpError

__all__ = ["BEGIN", "Moment", "Recording", "Trace", "read"]

VERSION = 1
BEGIN = '{"gguf_mtp_trace"'
"""How the line of an engine's start begins."""
MOST_CHARS = 1 << 24
"""Of a line."""

_CLOCK = "%Y-%m-%dT%H:%M:%SZ"


class Trace:
    """Gives `write` a record for each round; a `engine.observers.Observer`. `about` goes into the
    first."""

    def __init__(
        self, write: Callable[[Mapping[str, Any]], None], about: Mapping[str, Any]
    ) -> None:
        self._write = write
        self._start = time.perf_counter()
        started = time.strftime(_CLOCK, time.gmtime())
        write({"gguf_mtp_trace": VERSION, "started": started, **about})

    def round(self, report: RoundReport) -> None:
        """See `engine.observers.Observer`. `t`: when the round ended, in seconds since the trace
        began."""
        self._write(
            {
                "t": self._now(),
                "target_s": round(report.target_s, 6),
                "draft_s": round(report.draft_s, 6),
                "other_s": round(report.other_s, 6),
                **report.load._asdict(),
                "parts": [part._asdict() for part in report.parts],
            }
        )

    def fell_back(self, kind: Fallback, why: str) -> None:
        """See `engine.observers.Observer`."""
        self._write({"t": self._now(), "fallback": kind, "why": why})

    def _now(self) -> float:
        return round(time.perf_counter() - self._start, 6)


@dataclass(frozen=True, slots=True)
class Moment:
    """A round, and when it ended in seconds since the trace began."""

    t: float
    report: RoundReport


@dataclass(frozen=True, slots=True)
class Recording:
    """A trace that was read. `fallbacks` are times and sentences; `n_torn` lines at the end of an
    engine's life were not whole, as after a power cut. `about` is what the first of `n_starts`
    engines said of itself."""

    about: Mapping[str, Any]
    moments: Sequence[Moment]
    fallbacks: Sequence[tuple[float, str]]
    n_torn: int
    n_starts: int = 1


def read(path: Path) -> Recording:
    """Raises `GgufMtpError` for a file that is no trace, or damaged within an engine's lines."""
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            return _read(path, file)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise GgufMtpError(f"cannot read the trace {path}: {reason}") from None


def _read(path: Path, file: TextIO) -> Recording:
    reading = _Reading(path, _header(path, file.readline(MOST_CHARS)))
    torn_at: int | None = None
    lines = iter(lambda: file.readline(MOST_CHARS), "")
    for number, line in enumerate(lines, start=2):
        if torn_at is not None and not line.startswith(BEGIN):
            break
        torn_at = None
        try:
            reading.take(json.loads(line))
        except (ValueError, TypeError, KeyError):
            torn_at = number  # which only the last line of an engine may be
            reading.n_torn += 1
    else:
        return reading.recording()
    raise GgufMtpError(f"{path} line {torn_at} is not a round of a trace")


class _Reading:
    """What was read so far. Times go on where an engine was started again, and so do the numbers of
    requests, which every engine counts for itself."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.n_torn = 0
        self._path, self._about = path, about
        self._moments: list[Moment] = []
        self._fallbacks: list[tuple[float, str]] = []
        self._n_starts = 1
        self._begin_s, self._now_s = 0.0, 0.0  # since the first start
        self._first_request, self._last_request = 0, 0

    def take(self, record: Mapping[str, Any]) -> None:
        if "gguf_mtp_trace" in record:
            self._start_again(record)
            return
        self._now_s = self._begin_s + float(record["t"])
        if "fallback" in record:
            self._fallbacks.append((self._now_s, str(record["why"])))
            return
        report = _report(record, self._first_request)
        self._moments.append(Moment(self._now_s, report))
        self._last_request = max([self._last_request, *(p.request for p in report.parts)])

    def _start_again(self, about: Mapping[str, Any]) -> None:
        _check_version(self._path, about)
        self._n_starts += 1
        since = _seconds(about["started"]) - _seconds(self._about["started"])
        self._begin_s = max(since, self._now_s)  # somebody may have set the clock back
        self._first_request = self._last_request + 1

    def recording(self) -> Recording:
        return Recording(self._about, self._moments, self._fallbacks, self.n_torn, self._n_starts)


def _header(path: Path, line: str) -> Mapping[str, Any]:
    try:
        about = json.loads(line)
        about["gguf_mtp_trace"]
    except (ValueError, TypeError, KeyError, IndexError):
        raise GgufMtpError(f"{path} is not a gguf-mtp trace (serve --trace writes one)") from None
    assert isinstance(about, dict)
    _check_version(path, about)
    return about


def _check_version(path: Path, about: Mapping[str, Any]) -> None:
    version = about["gguf_mtp_trace"]
    if version != VERSION:
        raise GgufMtpError(f"{path} has trace version {version}, but only {VERSION} is supported")


def _seconds(started: str) -> float:
    """Since 1970."""
    return calendar.timegm(time.strptime(started, _CLOCK))


def _report(record: Mapping[str, Any], first_request: int) -> RoundReport:
    parts = [SequenceReport(**part) for part in record["parts"]]
    return RoundReport(
        parts=[part._replace(request=part.request + first_request) for part in parts],
        load=EngineLoad(*(int(record[name]) for name in EngineLoad._fields)),
        target_s=float(record["target_s"]),
        draft_s=float(record["draft_s"]),
        other_s=float(record["other_s"]),
    )
