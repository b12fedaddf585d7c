"""Values over time as characters, for terminals and logs alike: no colours, no cursor."""

from __future__ import annotations

from collections.abc import Sequence

BLOCKS = " ▁▂▃▄▅▆▇█"


def columns(values: Sequence[float | None], height: int, unit: str) -> list[str]:
    """A column for each value, `height` lines high, with a scale at the left; None leaves a gap.

    The scale begins at 0 and ends at the largest value, rounded up to two digits.
    """
    most = _ceiling(max((v for v in values if v is not None), default=0.0))
    labels = {0: f"{most:g} {unit}", height - 1: "0"}
    width = max(map(len, labels.values()))
    lines = []
    for row in range(height):
        floor = (height - 1 - row) * 8
        cells = (_cell(v, most, height, floor) for v in values)
        lines.append(f"{labels.get(row, ''):>{width}} ┤{''.join(cells)}")
    return lines


def bar(share: float, width: int) -> str:
    """A bar of at most `width` characters for a share from 0 to 1."""
    eighths = round(share * width * 8)
    full, rest = divmod(eighths, 8)
    partial = " ▏▎▍▌▋▊▉"[rest] if rest else ""
    return "█" * full + partial


def _cell(value: float | None, most: float, height: int, floor: int) -> str:
    if value is None or most == 0:
        return " "
    eighths = round(value / most * height * 8)
    if eighths == 0 and floor == 0:
        return BLOCKS[1]  # a measured 0 is not a gap
    return BLOCKS[min(max(eighths - floor, 0), 8)]


def _ceiling(value: float) -> float:
    """The smallest number of two digits that is not below `value`."""
    if value <= 0:
        return 1.0
    exponent = 0
    scale = 1.0
    while value * scale < 10:
        exponent, scale = exponent - 1, scale * 10
    while value * scale >= 100:
        exponent, scale = exponent + 1, scale / 10
    digits = -(-value * scale // 1)
    return float(f"{digits:.0f}e{exponent}")
