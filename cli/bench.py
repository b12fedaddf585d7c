"""`gguf-mtp bench`: what drafting gains on this machine, every way beside plain decoding."""

from __future__ import annotations

import json as json_module
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from .bench_report import counter, print_widths, show
from .placement_options import PlacementArgs
from .spread import spread

if TYPE_CHECKING:
    from ..bench.run import BenchVariant


class _Sizes(NamedTuple):
    """What options stand for that are not given."""

    workloads: str
    temps: str
    depths: str
    rounds: int
    prompts: int
    max_tokens: int


_QUICK = _Sizes("facts,code,repetition", "0", "1,3", 2, 2, 32)
_FULL = _Sizes("definitions,facts,code,repetition,random", "0,0.7,1", "1,2,3,4", 5, 2, 64)


@dataclass(frozen=True)
class MeasureArgs:
    """What is measured, and how often."""

    full: Annotated[
        bool,
        typer.Option(
            "--full/--quick",
            help="All workloads at three temperatures, five rounds: up to 69,000 tokens; quick: up "
            "to 2,304.",
        ),
    ] = False
    workloads: Annotated[
        str | None,
        typer.Option(
            help="Workloads, comma-separated: definitions, facts, code, repetition, random.",
            show_default=_QUICK.workloads.replace(",", ", "),
        ),
    ] = None
    temps: Annotated[
        str | None,
        typer.Option(help="Temperatures, comma-separated.", show_default=_QUICK.temps),
    ] = None
    depths: Annotated[
        str | None,
        typer.Option(help="Fixed draft depths, comma-separated.", show_default=_QUICK.depths),
    ] = None
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
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Measured rounds, after a warm-up round.",
            show_default=str(_QUICK.rounds),
        ),
    ] = None
    prompts: Annotated[
        int | None,
        typer.Option(
            min=1, help="Prompts per workload and round.", show_default=str(_QUICK.prompts)
        ),
    ] = None
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--max-tokens",
            min=1,
            help="Tokens per answer; with --replay the whole answer.",
            show_default=str(_QUICK.max_tokens),
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

    def sizes(self) -> _Sizes:
        """What is given, and for the rest what --full or --quick stands for."""
        base = _FULL if self.full else _QUICK
        given = {name: getattr(self, name) for name in _Sizes._fields}
        return base._replace(**{name: value for name, value in given.items() if value is not None})

    def ways(self) -> tuple[BenchVariant, ...]:
        """Beside plain decoding: fixed depths and automatic, or sets of drafters."""
        from ..bench.run import AUTO, automatic, fixed

        sets = tuple(automatic(names, self.draft_model) for names in self.draft or ())
        if self.draft_model and not any(way.draft_model for way in sets):
            raise typer.BadParameter("--draft-model needs --draft model")
        if sets:
            return sets
        return (*map(fixed, _counts(self.sizes().depths, "--depths")), AUTO)


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
        sizes = measure_args.sizes()
        print_widths(path, widths, sizes.rounds, sizes.max_tokens)
        return
    recordings = read_recordings(measure_args.replay) if measure_args.replay else []
    n_ctx = measure_args.ctx or (8192 if recordings else 1024)
    sizes = measure_args.sizes()
    plan = BenchPlan(
        ways=(PLAIN, *measure_args.ways()),
        workloads=_known(sizes.workloads),
        temperatures=(0.0,) if recordings else _numbers(sizes.temps, "--temps"),
        n_rounds=sizes.rounds,
        n_prompts=sizes.prompts,
        n_tokens=measure_args.max_tokens or (n_ctx if recordings else sizes.max_tokens),
        n_threads=measure_args.threads,
        n_ctx=n_ctx,
        placement=placement,
        recordings=recordings,
    )
    if not recordings:
        print(f"generating up to {plan.most_tokens:,} tokens", file=sys.stderr)
    cells = measure(path, plan, counter())
    result = document(path.name, cells, "gguf-mtp " + " ".join(sys.argv[1:]))
    if save:
        save.write_text(json_module.dumps(result, indent=1) + "\n", encoding="utf-8")
    if json:
        print(json_module.dumps(result))
    else:
        show(path, plan, cells, result)


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
