"""The bar that a conversion shows while somebody watches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..converters.convert import Progress


@contextmanager
def conversion_bar(quiet: bool) -> Iterator[Callable[[Progress], None] | None]:
    """A progress bar with bytes, rate and remaining time, on a terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bar

    columns = (
        BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )  # fmt: skip
    bar = Bar(*columns, console=Console(stderr=True))
    task = bar.add_task("", total=None)

    def show(p: Progress) -> None:
        bar.start()  # only now: what is in the cache already shows no bar
        bar.update(task, completed=p.n_done, total=p.n_total, description=p.tensor)

    try:
        yield show
    finally:
        bar.stop()
