"""From command-line options to a session, with what the user sees meanwhile."""

from __future__ import annotations

import sys
from pathlib import Path

from ..llama import accelerators
from ..loader import LoadOptions, load
from ..session import Session
from .options import ModelArgs


def open_session(args: ModelArgs, options: LoadOptions | None = None) -> Session:
    """Loads the model, or the demo model without one. `options` are those of `args` unless given.

    Raises `GgufMtpError`.
    """
    options = options or args.load_options()  # before anything is converted or loaded
    session = load(args.model or demo_path("f32" if args.strict else "q8_0"), options)
    if session.side is not None and options.draft_model is None:
        print(f"drafting with {session.side.path}, found beside the model", file=sys.stderr)
    return session


def demo_path(kind: str = "q8_0") -> Path:
    """The demo model's file, made on first use with a progress bar where somebody watches."""
    from ..demo import demo_model
    from .progress import conversion_bar

    with conversion_bar(quiet=False) as progress:
        return demo_model(kind=kind, progress=progress)


def describe(session: Session) -> str:
    """The start-up line: what was loaded, and what drafts."""
    facts, engine = session.facts, session.engine
    block = f"the MTP block in {Path(session.side.path).name}" if session.side else "its MTP block"
    drafting = (
        f"drafting with {block}, up to {engine.depth.n_max} tokens a round"
        if engine.is_drafting
        else "not drafting"
    )
    return (
        f"{facts.name or Path(facts.path).name}: {facts.architecture}, {facts.n_layer} layers, "
        f"context {engine.limits.n_ctx}, {drafting}"
    )


def placement(session: Session, n_gpu_layers: int) -> str:
    """Where the layers lie, the MTP block and the output counted as layers, as llama.cpp does."""
    facts = session.facts
    n_mtp = session.side.n_mtp if session.side else facts.n_mtp
    n_layers = facts.n_layer + (n_mtp if session.engine.is_drafting else 0) + 1
    devices = accelerators()
    n_offloaded = n_layers if n_gpu_layers < 0 else min(n_gpu_layers, n_layers)
    if not devices or n_offloaded == 0:
        return f"all {n_layers} layers on the CPU"
    rest = n_layers - n_offloaded
    return f"{n_offloaded} layers on {', '.join(devices)}, {rest or 'none'} on the CPU"
