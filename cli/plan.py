"""`gguf-mtp plan`: where a model would be placed, how much context fits, and how fast it may run.

It needs neither the hardware nor the weights: a header will do, or a hub's config.json and the type
that it would be converted to.
"""

from __future__ import annotations

import json as json_module
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .spread import spread

if TYPE_CHECKING:
    from ..offload import Machine, OffloadPlan, Subject
    from ..types import ModelFacts

__all__ = ["plan"]


@dataclass(frozen=True)
class MachineArgs:
    """A machine, as it is or as it might be."""

    vram: Annotated[
        str | None,
        typer.Option(
            metavar="SIZES",
            help="Free memory of each device, with GB/s if known: 24G,48G@1000; 0: no device. "
            "Default: this machine's devices.",
            show_default=False,
        ),
    ] = None
    ram: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="CPU memory, with GB/s if known: 256G@80. Default: this machine's memory.",
            show_default=False,
        ),
    ] = None
    margin: Annotated[
        str, typer.Option(metavar="SIZE", help="Memory to leave free on each device.")
    ] = "1G"


@dataclass(frozen=True)
class RunArgs:
    """The run that is planned."""

    ctx: Annotated[
        int,
        typer.Option(
            "-c",
            "--ctx",
            "--ctx-size",
            min=0,
            help="Context size in tokens; 0: the model's context size, at most 8192.",
        ),
    ] = 0
    parallel: Annotated[
        int, typer.Option("-np", "--parallel", min=1, help="Number of parallel sequences.")
    ] = 1
    batch: Annotated[
        int,
        typer.Option(
            "-ub", "--ubatch-size", min=0, help="Maximum number of tokens per decode; 0: 512."
        ),
    ] = 0
    cache_type: Annotated[
        str, typer.Option("--cache-type", help="Type of the KV cache: f16, q8_0, q4_0, ...")
    ] = "f16"
    draft: Annotated[bool, typer.Option(help="Load the MTP block, if the model has one.")] = True
    draft_max: Annotated[
        int | None,
        typer.Option(
            "--draft-max",
            min=0,
            help="Maximum number of tokens to draft at once. Default: as the model would be run.",
            show_default=False,
        ),
    ] = None
    ngram_max: Annotated[
        int,
        typer.Option("--ngram-max", min=0, help="Maximum number of tokens to copy at once."),
    ] = 48
    draft_model: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with the MTP block, or a smaller model to draft with.",
            show_default=False,
        ),
    ] = None


@spread
def plan(
    machine_args: MachineArgs,
    run_args: RunArgs,
    model: Annotated[
        Path | None,
        typer.Argument(help="A GGUF file; only its header is read.", show_default="the demo model"),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A checkpoint's config.json instead of a GGUF file.",
            show_default=False,
        ),
    ] = None,
    type_: Annotated[
        str, typer.Option("--type", help="With --config: the type to convert to.")
    ] = "q4_k_m",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Plan the placement of a model and predict its speed, without loading it. The exit code is 1
    if the model does not fit."""
    from ..offload import fit
    from ..offload.report import account, document

    facts, side = _facts(model, config, type_)
    subject, draft = _subjects(facts, side, run_args)
    machine = _machine(machine_args)
    beside = fit(draft, machine) if draft else None
    if beside:
        machine = machine.without(beside)
    made = fit(subject, machine)
    found = document(made, subject, machine)
    if beside:
        found["draft_model"] = account(beside)
    if json:
        print(json_module.dumps(found, ensure_ascii=False))
    else:
        _show(made, found)
    if not found["fits"]:
        raise typer.Exit(1)


def _facts(
    model: Path | None, config: Path | None, type_: str
) -> tuple[ModelFacts, ModelFacts | None]:
    """The model's, and those of a drafter in a file of its own."""
    from ..errors import RequestError

    if model is not None and config is not None:
        raise RequestError("give a model file or --config, not both")
    if config is None:
        from ..drafters.registry import drafter_beside
        from ..gguf.model_facts import read
        from .open_session import demo_path

        facts = read(model or demo_path())
        return facts, None if facts.can_draft else drafter_beside(facts)[1]
    from ..converters.from_config import facts_from_config

    return facts_from_config(config, type_)


def _subjects(
    facts: ModelFacts, beside: ModelFacts | None, args: RunArgs
) -> tuple[Subject, Subject | None]:
    """What is placed: the model with its drafter, and the draft model where one is named."""
    from ..offload import Subject
    from ..placement import context_size
    from ..placement.draft_placement import draft_subject

    wanted = args.draft and args.draft_max != 0
    side, model = beside if wanted else None, None
    if wanted and args.draft_model:
        side, model = _drafting(facts, args.draft_model)
    drafts = wanted and model is None and (side is not None or facts.can_draft)
    n_ctx = args.ctx or min(facts.context_length, context_size.N_CTX)
    n_draft = args.draft_max if wanted else 0
    if n_draft is None:
        n_draft = context_size.draft_max(facts, side)
    n_copy = context_size.copies(facts, n_draft, args.ngram_max) if wanted else 0
    contexts = context_size.contexts(n_ctx, args.parallel, n_draft, drafts, args.batch, n_copy)
    contexts = replace(contexts, cache_k=args.cache_type, cache_v=args.cache_type)
    subject = Subject(facts, context_size.with_states(contexts, facts, n_draft), side)
    return subject, draft_subject(model, contexts) if model else None


def _drafting(facts: ModelFacts, file: Path) -> tuple[ModelFacts | None, ModelFacts | None]:
    """The file as an MTP block, or as a draft model; of a model that is only announced there are no
    weights to compare it with."""
    from ..gguf import model_facts, side_file
    from ..loading.select import assign_file

    if Path(facts.path).is_file():
        spec, found = assign_file(facts, file)
        return (found, None) if spec.needs_block else (None, found)
    if model_facts.is_side_file(model_facts.read_any(file)):
        return side_file.read(file), None
    return None, model_facts.read(file)


def _machine(args: MachineArgs) -> Machine:
    from ..offload import Machine, parse_devices, parse_host, parse_size

    margin = parse_size(args.margin)
    if args.vram is None:
        from ..llama import devices

        found = devices(margin)
    else:
        found = parse_devices(args.vram, margin)
    if args.ram is None:
        from ..placement.host_memory import host

        return Machine(found, host())
    return Machine(found, parse_host(args.ram))


def _show(made: OffloadPlan, found: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from ..offload.report import HEADINGS, rows

    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False)
    for i, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if i else "left", no_wrap=True)
    for row in rows(made):
        table.add_row(*row)
    console = Console(highlight=False, soft_wrap=True)
    console.print(found["model"], markup=False)
    console.print(table)
    for text in _summary(made, found):
        console.print(text, markup=False)


def _summary(made: OffloadPlan, found: dict[str, Any]) -> list[str]:
    from ..offload.advice import gib, rate

    context, predicted = found["context"], found["predicted"]
    out = [
        "",
        f"{'place':12}" + "".join(f"{h:>11}" for h in ("weights", "cache", "buffers", "used")),
    ]
    out[-1] += "  of"
    for device in found["devices"]:
        name, budget = device["name"], device["budget"]
        of = gib(budget) if budget is not None else "unknown"
        sizes = (made.weights(name), made.cache(name), made.compute.get(name, 0), device["used"])
        out.append(f"{name:12}" + "".join(f"{gib(n):>11}" for n in sizes) + f"  {of}")
    most = f"{context['most_cells_without_mtp']:,} without MTP"
    if context["most_cells_with_mtp"] is not None:
        most = f"{context['most_cells_with_mtp']:,} with MTP, {most}"
    held = (
        "that keeps the KV cache on the devices"
        if len(found["devices"]) > 1
        else "that fits in memory"
    )
    draft = found.get("draft_model")
    if draft:
        lies = ", ".join(f"{gib(d['used'])} {d['name']}" for d in draft["devices"] if d["used"])
        out += ["", f"draft       {draft['model']}: {lies}, already subtracted above"]
    out += ["", f"context     {context['cells']:,} tokens; maximum {held}: {most}"]
    if len(found["devices"]) > 1 and not context["op_offload"]:
        out.append(
            "batches     use the CPU's experts in place (--no-op-offload): copies do not fit"
        )
    by_depth = ", ".join(f"depth {k} {rate(v)}" for k, v in predicted["by_depth"].items())
    assumed = f" (acceptance {predicted['acceptance_assumed']} assumed)" if by_depth else ""
    bandwidths = ", ".join(f"{d} {b / 1e9:.0f} GB/s" for d, b in predicted["bandwidth"].items())
    out.append(
        f"prediction  {'' if found['fits'] else 'if it fitted: '}"
        f"plain {rate(predicted['plain'])} tokens/s"
        + (f", {by_depth}{assumed}" if by_depth else "")
        + f", from {bandwidths}"
    )
    return [*out, *(f"note        {sentence}" for sentence in found["advice"])]
