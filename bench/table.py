"""Cells as a table for people, and as plain values for machines."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .run import PLAIN, BenchCell, median_ratio

_SHOWN = 4
COLUMNS = (
    "workload",
    "temp",
    "variant",
    "tokens/s",
    "x plain",
    "tokens/round",
    "acceptance by position",
    "min-max",
    "accepted/drafted",
    "target/draft/other",
)
N_ESSENTIAL = 7
"""The first of them, which fit on a terminal of 80 columns."""


def rows(cells: Sequence[BenchCell]) -> Iterator[list[str]]:
    """One row a cell, in `COLUMNS`."""
    for cell in cells:
        value = values(cell, _plain_of(cell, cells))
        yield [
            cell.workload,
            f"{cell.temperature:g}",
            cell.way,
            f"{value['tokens_per_s']:.1f}",
            f"{value['x_plain']:.3f}" if value["x_plain"] is not None else "",
            f"{value['tokens_per_round']:.2f}",
            _first(value["acceptance_per_position"]),
            f"{value['min']:.1f}-{value['max']:.1f}",
            ", ".join(f"{name} {a}/{n}" for name, (_, n, a) in value["by_drafter"].items()),
            "/".join(f"{100 * share:.0f}" for share in value["time_shares"]) + " %",
        ]


def _first(rates: Sequence[float]) -> str:
    """Of the first positions; those of a long copy fill no table."""
    shown = " ".join(f"{rate:.2f}" for rate in rates[:_SHOWN])
    return f"{shown} ..." if len(rates) > _SHOWN else shown


def values(cell: BenchCell, plain: BenchCell | None) -> dict[str, Any]:
    """The figures of a cell: medians over its rounds, ratios to `plain` within each round."""
    total = cell.total
    shares = (total.target_s, total.draft_s, total.decode_s - total.target_s - total.draft_s)
    accepted = [*total.accepted_per_position]
    accepted += [0] * (len(total.judged_per_position) - len(accepted))
    return {
        "workload": cell.workload,
        "temperature": cell.temperature,
        "way": cell.way,
        "tokens_per_s": statistics.median(cell.speeds),
        "min": min(cell.speeds),
        "max": max(cell.speeds),
        "x_plain": median_ratio(cell, plain) if plain else None,
        "acceptance_per_position": [
            a / n for a, n in zip(accepted, total.judged_per_position, strict=True)
        ],
        "tokens_per_round": total.tokens_per_round,
        "time_shares": [part / total.decode_s if total.decode_s else 0.0 for part in shares],
        "rounds_per_depth": total.rounds_per_depth,
        "by_drafter": total.by_drafter,
        "n_tokens": total.decode_tokens,
    }


def document(model: str, cells: Sequence[BenchCell], command: str) -> dict[str, Any]:
    """Everything needed to read the figures later: what, where, when, how."""
    return {
        "model": model,
        "machine": machine(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "command": command,
        "versions": {name: version(name) for name in ("gguf-mtp", "llama-cpp-python", "numpy")},
        "cells": [values(cell, _plain_of(cell, cells)) for cell in cells],
    }


def machine() -> str:
    """The processor's name and the cores this process may use."""
    from ..loading.cores import physical_cores

    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{name}, {physical_cores()} cores"


def _plain_of(cell: BenchCell, cells: Sequence[BenchCell]) -> BenchCell | None:
    for other in cells:
        if (other.workload, other.temperature) == (cell.workload, cell.temperature) and (
            other.way == PLAIN.name
        ):
            return other
    return None
