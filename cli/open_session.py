"""From command-line options to a session, with what the user sees meanwhile."""

from __future__ import annotations

import sys
from pathlib import Path

from ..drafters.registry import DRAFTERS, label_of
from ..loading.loader import LoadOptions, load
from ..session import Session
from .options import ModelArgs
from .placement_options import PlacementArgs


def open_session(
    args: ModelArgs, placing: PlacementArgs | None = None, options: LoadOptions | None = None
) -> Session:
    """Loads the model, or the demo model without one. `options` are those of `args` and `placing`
    unless given.

    Raises `GgufMtpError`.
    """
    options = options or args.load_options(placing)  # before anything is converted or loaded
    session = load(args.model or demo_path("f32" if args.strict else "q8_0"), options)
    if session.side is not None and options.draft_model is None:
        print(f"drafting with {session.side.path}, found in the model's folder", file=sys.stderr)
    return session


def demo_path(kind: str = "q8_0") -> Path:
    """The demo model's file, made on first use with a progress bar on a terminal."""
    from ..demo import demo_model
    from .progress import conversion_bar

    with conversion_bar(quiet=False) as progress:
        return demo_model(kind=kind, progress=progress)


def describe(session: Session) -> str:
    """The start-up line: what was loaded, and what drafts."""
    facts, engine = session.facts, session.engine
    labels = {name: label_of(name) for name in engine.drafting.names}
    for name in labels:
        if session.side and name in DRAFTERS and DRAFTERS[name].needs_block:
            what = label_of(name).removeprefix("its ")
            labels[name] = f"the {what} in {Path(session.side.path).name}"
    drafters = " and ".join(labels[name] for name in engine.drafting.names)
    drafting = (
        f"drafting with {drafters}, up to {engine.depth.n_max} tokens per round"
        if engine.is_drafting
        else "not drafting"
    )
    return (
        f"{facts.name or Path(facts.path).name}: {facts.architecture}, {facts.n_layer} layers, "
        f"context {engine.limits.n_ctx}, {drafting}"
    )


def placement(session: Session) -> str:
    """Where everything lies, in a line; one more when llama.cpp put something elsewhere."""
    return "\n".join(session.placement.lines()) if session.placement else ""
