"""`gguf-mtp inspect`: what a GGUF's header says, and whether its MTP block can draft.

It reads headers only, so it answers at once for files larger than memory; and says where a run
would put the model on this machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from ..types import ModelFacts

__all__ = ["inspect"]


def inspect(
    model: Annotated[
        Path | None,
        typer.Argument(help="A GGUF file, or its first shard.", show_default="the demo model"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    deep: Annotated[
        bool,
        typer.Option(
            "--deep", help="Also load the file in a child process and decode two tokens with it."
        ),
    ] = False,
) -> None:
    """Show what a model file contains, and whether its MTP block can draft."""
    from ..drafters.registry import drafter_beside, label_of
    from ..gguf.missing_keys import missing_keys
    from ..gguf.model_facts import is_side_file, read_any, summary

    if model is None:
        from ..demo import demo_model

        model = demo_model()
    facts = read_any(model)
    found = summary(facts)
    if not is_side_file(facts):
        found["missing_keys"] = list(missing_keys(facts))
        name, side = ("", None) if facts.can_draft else drafter_beside(facts)
        if side is not None:
            found |= {
                "can_draft": True,
                "reason": f"{Path(side.path).name} next to it holds {label_of(name)}",
            }
        found["side_file"] = side.path if side else None
        found["placement"] = _placement(facts, side)
    if deep:
        from ..loading import first_load

        first_load.check([first_load.FirstLoad(facts, facts.n_mtp > 0)], always=True)
        found["loads"] = True
    if as_json:
        typer.echo(json.dumps(found, ensure_ascii=False, indent=2))
    else:
        _show(found)


def _placement(facts: ModelFacts, side: ModelFacts | None) -> str:
    """Where a run with the defaults would put it on this machine, in a line."""
    from .. import llama
    from ..offload import Host, Machine, Subject, fit, report
    from ..placement import context_size

    n_ctx = min(facts.context_length, context_size.N_CTX)
    has_block, n_copy = facts.can_draft or side is not None, context_size.copies(facts, 8, 48)
    contexts = context_size.contexts(n_ctx, 1, 8, has_block, n_copy=n_copy)
    contexts = context_size.with_states(contexts, facts, 8)
    return report.line(fit(Subject(facts, contexts, side), Machine(llama.devices(), Host())))


def _show(found: Mapping[str, Any]) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{found['name'] or 'unnamed'}  {found['path']}", markup=False)
    console.print(
        f"{found['architecture']}, {found['n_layer']} layers, {found['n_mtp']} MTP, "
        f"context {found['context_length']:,}, vocabulary {found['vocab']:,}, "
        f"{_size(found['file_bytes'])}",
        markup=False,
    )
    drafts = "drafts" if found["can_draft"] else "does not draft"
    console.print(f"{drafts}: {found['reason']}", markup=False)
    if missing := found.get("missing_keys"):
        console.print(
            f"lacks {', '.join(missing)}: llama.cpp uses defaults, so the text may differ",
            markup=False,
        )
    if found.get("loads"):
        console.print("loads and decodes two tokens", markup=False)
    if "placement" in found:
        console.print(f"placement: {found['placement']}", markup=False)
    console.print()
    console.print(_table(found["tensors"]))


def _table(groups: Mapping[str, Mapping[str, int]]) -> Table:
    from rich import box
    from rich.table import Table

    total = sum(sum(types.values()) for types in groups.values())
    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False)
    table.add_column("tensors")
    table.add_column("type")
    table.add_column("size", justify="right")
    table.add_column("share", justify="right")
    rows = [(n, group, kind) for group, types in groups.items() for kind, n in types.items()]
    for n, group, kind in sorted(rows, reverse=True):
        table.add_row(group, kind, _size(n), f"{n / total:.1%}")
    return table


def _size(n_bytes: int) -> str:
    size, units = float(n_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} B" if units[0] == "B" else f"{size:.1f} {units[0]}"
