"""`gguf-mtp bench`: what drafting gains on this machine, every way beside plain decoding."""

from __future__ import annotations

import json as json_module
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .placement_options import PlacementArgs
from .spread import spread

if TYPE_CHECKING:
    from ..bench.run import BenchCell, BenchPlan, BenchVariant


@dataclass(frozen=True)
class MeasureArgs:
    """What is measured, and how often."""

    workloads: Annotated[
        str,
        typer.Option(
            help="Workloads, comma-separated: definitions, facts, code, repetition, random."
        ),
    ] = "definitions,facts,code,repetition,random"
    temps: Annotated[str, typer.Option(help="Temperatures, comma-separated.")] = "0,0.7,1"
    depths: Annotated[str, typer.Option(help="Fixed draft depths, comma-separated.")] = "1,2,3,4"
    draft: Annotated[
        list[str] | None,
        typer.Option(
            help="Measure automatic depth with these drafters instead: ngram,mtp; repeatable."
        ),
    ] = None
    draft_model: Annotated[
        Path | None,
        typer.Option(help="Draft model for --draft model.", show_default=False),
    ] = None
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds, after a warm-up round.")] = 5
    prompts: Annotated[int, typer.Option(min=1, help="Prompts per workload and round.")] = 2
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--max-tokens",
            min=1,
            help="Tokens per answer. Default: 64; with --replay the whole answer.",
            show_default=False,
        ),
    ] = None
    replay: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="Replay recorded answers instead: lines of JSON with messages, the last of which "
            "is the answer.",
            show_default=False,
        ),
    ] = None
    ctx: Annotated[
        int,
        typer.Option("-c", "--ctx-size", min=0, help="Context size; 0: 1024, with --replay 8192."),
    ] = 0
    threads: Annotated[
        int,
        typer.Option("-t", "--threads", min=0, help="Number of threads; 0: one per physical core."),
    ] = 0

    def ways(self) -> tuple[BenchVariant, ...]:
        """Beside plain decoding: fixed depths and automatic, or sets of drafters."""
        from ..bench.run import AUTO, automatic, fixed

        sets = tuple(automatic(names, self.draft_model) for names in self.draft or ())
        if self.draft_model and not any(way.draft_model for way in sets):
            raise typer.BadParameter("--draft-model needs --draft model")
        if sets:
            return sets
        return (*map(fixed, _counts(self.depths, "--depths")), AUTO)


@spread
def bench(
    measure_args: MeasureArgs,
    placement_args: PlacementArgs,
    model: Annotated[
        Path | None,
        typer.Argument(help="GGUF file to measure. Default: the demo model.", show_default=False),
    ] = None,
    widened: Annotated[
        str | None,
        typer.Option(
            help="Make and measure a memory-bound model from the demo: dense-bf16, moe-q8_0 or "
            "moe-q4_0.",
        ),
    ] = None,
    parallel: Annotated[
        str | None,
        typer.Option(
            help="Measure parallel sequences instead: numbers of sequences, comma-separated."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    save: Annotated[Path | None, typer.Option(help="Write the JSON document to this file.")] = None,
) -> None:
    """Compare tokens/s and acceptance of plain decoding, fixed draft depths and automatic depth."""
    from ..bench.replay import read_recordings
    from ..bench.run import PLAIN, BenchPlan, measure
    from ..bench.table import document
    from ..errors import RequestError

    if placement_args.rpc:
        raise RequestError(
            "bench loads the model once for every variant, but an RPC worker serves only one at a "
            "time; leave out --rpc"
        )
    placement = placement_args.placement()
    path = _model(model, widened)
    if save:
        _check_save(save, path)
    if parallel:
        widths = _counts(parallel, "--parallel")
        _measure_widths(path, widths, measure_args.rounds, measure_args.max_tokens or 64)
        return
    recordings = read_recordings(measure_args.replay) if measure_args.replay else []
    n_ctx = measure_args.ctx or (8192 if recordings else 1024)
    plan = BenchPlan(
        ways=(PLAIN, *measure_args.ways()),
        workloads=_known(measure_args.workloads),
        temperatures=(0.0,) if recordings else _numbers(measure_args.temps, "--temps"),
        n_rounds=measure_args.rounds,
        n_prompts=measure_args.prompts,
        n_tokens=measure_args.max_tokens or (n_ctx if recordings else 64),
        n_threads=measure_args.threads,
        n_ctx=n_ctx,
        placement=placement,
        recordings=recordings,
    )
    cells = measure(path, plan, _counter())
    result = document(path.name, cells, "gguf-mtp " + " ".join(sys.argv[1:]))
    if save:
        save.write_text(json_module.dumps(result, indent=1) + "\n", encoding="utf-8")
    if json:
        print(json_module.dumps(result))
    else:
        _show(path, plan, cells, result)


def _check_save(save: Path, model: Path) -> None:
    """Before an hour of measuring, not after it."""
    from ..errors import RequestError

    folder = save.absolute().parent
    if save.is_dir() or not folder.is_dir():
        raise RequestError(
            f"--save {save} cannot be written: it is a folder, or its folder does not exist"
        )
    if not os.access(save if save.exists() else folder, os.W_OK):
        raise RequestError(f"--save {save} cannot be written: Permission denied")
    if save.exists() and save.samefile(model):
        raise RequestError(f"--save {save} is the model; give another name")


def _measure_widths(path: Path, widths: Sequence[int], n_rounds: int, n_tokens: int) -> None:
    from ..bench.parallel import measure_widths

    cells = measure_widths(path, widths, n_rounds, n_tokens, _counter())
    plain = {cell.n_seq: cell.aggregate for cell in cells if cell.way == "plain"}
    print("sequences  variant total tokens/s  per seq  x plain  x one sequence  rounds")
    for cell in cells:
        one = next(other.aggregate for other in cells if other.way == cell.way)
        print(
            f"{cell.n_seq:9}  {cell.way:5}  {cell.aggregate:15.1f}  "
            f"{cell.aggregate / cell.n_seq:7.1f}  {cell.aggregate / plain[cell.n_seq]:7.3f}  "
            f"{cell.aggregate / one:14.2f}  {cell.runs[-1].n_rounds:6}"
        )


def _model(model: Path | None, widened: str | None) -> Path:
    if widened is None:
        from .open_session import demo_path

        return model or demo_path()
    if model is not None:
        raise typer.BadParameter("give a model or --widened, not both")
    from ..bench.widen import KINDS, widened_model

    if widened not in KINDS:
        raise typer.BadParameter(f"--widened {widened} is unknown; use one of {', '.join(KINDS)}")
    made: Path = widened_model(widened)
    return made


def _numbers(text: str, option: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in _parts(text, option))
    except ValueError:
        raise typer.BadParameter(f"{option} {text} is not a list of numbers") from None


def _counts(text: str, option: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in _parts(text, option))
    except ValueError:
        raise typer.BadParameter(f"{option} {text} is not a list of whole numbers") from None


def _parts(text: str, option: str) -> list[str]:
    parts = [part for part in text.split(",") if part]
    if not parts:
        raise typer.BadParameter(f"{option} is an empty list")
    return parts


def _known(text: str) -> tuple[str, ...]:
    from ..bench.workloads import NAMES

    names = tuple(_parts(text, "--workloads"))
    for name in names:
        if name not in NAMES:
            raise typer.BadParameter(f"workload {name} is unknown; use one of {', '.join(NAMES)}")
    return names


def _counter() -> Any:
    """Says how far the measurement is, on a terminal."""
    if not sys.stderr.isatty():
        return None

    def show(n_done: int, n_total: int) -> None:
        end = "\n" if n_done == n_total else ""
        print(f"\r{n_done} of {n_total} measured", end=end, file=sys.stderr, flush=True)

    return show


def _show(path: Path, plan: BenchPlan, cells: list[BenchCell], result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from ..bench.table import COLUMNS, rows

    table = Table(title=f"{path.name}, {result['machine']}, {plan.n_rounds} rounds, medians")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in COLUMNS[:3] else "right")
    last = None
    for row in rows(cells):
        if last is not None and row[:2] != last[:2]:
            table.add_section()
        table.add_row(*row)
        last = row
    Console(width=None if sys.stdout.isatty() else 160).print(table)
