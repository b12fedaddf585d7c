"""A trace as a picture, with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import GgufMtpError
from ..telemetry.trace import Recording
from ..telemetry.trace_stats import acceptance, bins

N_BINS = 200


def save(recording: Recording, path: Path) -> None:
    """Three panels: tokens/s, depth, acceptance. Raises `GgufMtpError` without matplotlib, for a
    file name that is no picture's, and for a trace without rounds."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise GgufMtpError("--png needs matplotlib: pip install 'gguf-mtp[plot]'") from None
    if not recording.moments:
        raise GgufMtpError("there is nothing to draw: no rounds were traced")
    figure = Figure(figsize=(9, 8), layout="constrained")
    speed, depth, positions = figure.subplots(3, 1)
    figure.suptitle(f"{recording.about.get('model', '')} {recording.about.get('started', '')}")
    pieces = bins(recording.moments, N_BINS)
    start = recording.moments[0].t - recording.moments[0].report.seconds
    width = (recording.moments[-1].t - start) / N_BINS
    times = [start + (i + 0.5) * width for i in range(N_BINS)]
    _line(speed, times, [b.tokens_per_s for b in pieces], "tokens/s, all sequences")
    _line(depth, times, [b.depth for b in pieces], "tokens drafted per round")
    for t, _ in recording.fallbacks:
        depth.axvline(t, color="tab:red", linewidth=1)
    found = acceptance(recording.moments)
    places = range(1, len(found) + 1)
    positions.bar(places, [one.rate for one in found], width=0.6, color="tab:green")
    positions.set(ylim=(0, 1), ylabel="acceptance", xlabel="position in the draft")
    positions.set_xlim(0.4, max(len(found), 8) + 0.6)
    positions.set_xticks(places)
    try:
        figure.savefig(path)
    except ValueError as error:
        raise GgufMtpError(f"cannot draw {path}: {error}") from None
    except OSError as error:
        raise GgufMtpError(f"cannot write {path}: {error.strerror}") from None


def _line(axes: Any, times: Sequence[float], values: Sequence[float | None], label: str) -> None:
    axes.plot(times, [float("nan") if v is None else v for v in values], drawstyle="steps-mid")
    axes.set(ylabel=label, xlabel="s")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
