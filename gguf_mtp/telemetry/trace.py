"""Every round of an engine as a line of JSON, and such a file read back.

The first line says what was traced; then comes one line for each decode of the target, and one
for each time the engine had to do with less than it wanted. Knows no terminal and no plots.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf_mtp.errors import GgufMtpError
from gguf_mtp.rounds import Fallback, Load, Part, RoundReport

__all__ = ["Moment", "Recording", "Trace", "read"]

VERSION = 1


class Trace:
    """Gives `write` a record for each round; a `rounds.Observer`. `about` goes into the first."""

    def __init__(
        self, write: Callable[[Mapping[str, Any]], None], about: Mapping[str, Any]
    ) -> None:
        self._write = write
        self._start = time.perf_counter()
        started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        write({"gguf_mtp_trace": VERSION, "started": started, **about})

    def round(self, report: RoundReport) -> None:
        """See `rounds.Observer`. `t`: when the round ended, in seconds since the trace began."""
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
        """See `rounds.Observer`."""
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
    """A trace that was read. `fallbacks` are times and sentences; `n_torn` lines at its end were
    not whole, as after a power cut."""

    about: Mapping[str, Any]
    moments: Sequence[Moment]
    fallbacks: Sequence[tuple[float, str]]
    n_torn: int


def read(path: Path) -> Recording:
    """Raises `GgufMtpError` for a file that is no trace, or damaged before its last line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise GgufMtpError(f"cannot read the trace {path}: {reason}") from None
    moments: list[Moment] = []
    fallbacks: list[tuple[float, str]] = []
    about = _header(path, lines)
    n_torn = 0
    for number, line in enumerate(lines[1:], start=2):
        try:
            record = json.loads(line)
            if "fallback" in record:
                fallbacks.append((float(record["t"]), str(record["why"])))
            else:
                moments.append(_moment(record))
        except (ValueError, TypeError, KeyError):
            if number < len(lines):
                raise GgufMtpError(f"{path} line {number} is no round of a trace") from None
            n_torn = 1
    return Recording(about, moments, fallbacks, n_torn)


def _header(path: Path, lines: Sequence[str]) -> Mapping[str, Any]:
    try:
        about = json.loads(lines[0])
        version = about["gguf_mtp_trace"]
    except (ValueError, TypeError, KeyError, IndexError):
        raise GgufMtpError(f"{path} is no trace of gguf-mtp (serve --trace writes one)") from None
    if version != VERSION:
        raise GgufMtpError(f"{path} is a trace of version {version}, but only {VERSION} is known")
    assert isinstance(about, dict)
    return about


def _moment(record: Mapping[str, Any]) -> Moment:
    report = RoundReport(
        parts=[Part(**part) for part in record["parts"]],
        load=Load(*(int(record[name]) for name in Load._fields)),
        target_s=float(record["target_s"]),
        draft_s=float(record["draft_s"]),
        other_s=float(record["other_s"]),
    )
    return Moment(float(record["t"]), report)
