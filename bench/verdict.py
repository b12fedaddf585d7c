"""What a measurement says, in two sentences."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ..stats import Stats
from .run import AUTO, PLAIN, BenchCell, fixed, median_ratio

__all__ = ["verdict"]

_ONE = fixed(1).name


def verdict(cells: Sequence[BenchCell]) -> list[str]:
    """The gain of every automatic way by workload, medians over the temperatures, and what a round
    with one drafted token costs and yields where depth 1 was measured."""
    lines = []
    for way in dict.fromkeys(c.way for c in cells if c.way != PLAIN.name and "depth" not in c.way):
        gains = _gains([c for c in cells if c.way in (way, PLAIN.name)], way)
        name = "automatic drafting" if way == AUTO.name else f"drafts of {way}"
        parts = [f"{gain:.2f} on {workload}" for workload, gain in gains.items()]
        lines.append(f"With {name} the speed, relative to plain decoding, is {_listed(parts)}.")
    plain, one = (_total(cells, name) for name in (PLAIN.name, _ONE))
    if one.rounds > one.first_tokens and plain.tokens_per_s:
        rounds = one.rounds - one.first_tokens
        cost = one.decode_s / rounds * plain.tokens_per_s
        share = one.draft_s / one.decode_s
        gained = (one.decode_tokens - one.first_tokens) / rounds
        lines.append(
            f"A round that drafts one token takes {cost:.2f} plain steps ({share * cost:.2f} of "
            f"them to draft) and yields {gained:.2f} tokens: drafting pays where the second "
            "number is the larger."
        )
    return lines


def _gains(cells: Sequence[BenchCell], way: str) -> dict[str, float]:
    plain = {(c.workload, c.temperature): c for c in cells if c.way == PLAIN.name}
    gains: dict[str, list[float]] = {}
    for cell in cells:
        beside = plain.get((cell.workload, cell.temperature))
        if cell.way == way and beside is not None:
            gains.setdefault(cell.workload, []).append(median_ratio(cell, beside))
    return {workload: statistics.median(values) for workload, values in gains.items()}


def _total(cells: Sequence[BenchCell], way: str) -> Stats:
    total = Stats()
    for cell in cells:
        if cell.way == way:
            total += cell.total
    return total


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
