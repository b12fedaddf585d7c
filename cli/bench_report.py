"""How `gguf-mtp bench` shows what it measures: progress, tables, the verdict."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..bench.run import BenchCell, BenchPlan


def print_widths(path: Path, widths: Sequence[int], n_rounds: int, n_tokens: int) -> None:
    from ..bench.parallel import measure_widths

    cells = measure_widths(path, widths, n_rounds, n_tokens, counter())
    plain = {cell.n_seq: cell.aggregate for cell in cells if cell.way == "plain"}
    print("sequences  variant total tokens/s  per seq  x plain  x one sequence  rounds")
    for cell in cells:
        one = next(other.aggregate for other in cells if other.way == cell.way)
        print(
            f"{cell.n_seq:9}  {cell.way:5}  {cell.aggregate:15.1f}  "
            f"{cell.aggregate / cell.n_seq:7.1f}  {cell.aggregate / plain[cell.n_seq]:7.3f}  "
            f"{cell.aggregate / one:14.2f}  {cell.runs[-1].n_rounds:6}"
        )


def counter() -> Any:
    """Says how far the measurement is and how long it will take, on a terminal."""
    if not sys.stderr.isatty():
        return None
    start = time.monotonic()

    def show(n_done: int, n_total: int) -> None:
        end = "\n" if n_done == n_total else ""
        left = (time.monotonic() - start) / n_done * (n_total - n_done)
        text = f"\r{n_done} of {n_total} measured, {left:.0f} s left   "
        print(text, end=end, file=sys.stderr, flush=True)

    return show


def show(path: Path, plan: BenchPlan, cells: list[BenchCell], result: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from ..bench.table import COLUMNS, N_ESSENTIAL, rows
    from ..bench.verdict import verdict

    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    n_columns = len(COLUMNS) if console.width >= 140 else N_ESSENTIAL
    rounds = "1 round" if plan.n_rounds == 1 else f"medians of {plan.n_rounds} rounds"
    print(f"{path.name}, {result['machine']}, {rounds}\n")
    table = Table(box=box.SIMPLE, pad_edge=False, show_edge=False)
    for column in COLUMNS[:n_columns]:
        is_text = column in COLUMNS[:3]
        table.add_column(column, justify="left" if is_text else "right", overflow="fold")
    last = None
    for row in rows(cells):
        if last is not None and row[:2] != last[:2]:
            table.add_section()
        table.add_row(*row[:n_columns])
        last = row
    console.print(table)
    for sentence in verdict(cells):
        console.print(f"\n{sentence}")
