"""A model with its contexts and drafters, put together as planned.

The table of drafters is here: a new one is a name in `drafters.names` and a line in `DRAFTERS`.
Decides nothing during generation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import NamedTuple

from gguf_mtp.drafters.draft_model import ModelDrafter
from gguf_mtp.drafters.mtp import MtpDrafter
from gguf_mtp.drafters.ngram import NgramDrafter
from gguf_mtp.errors import LoadFailed
from gguf_mtp.llama import Context, ContextOptions, Model, connect
from gguf_mtp.loading.select import DrafterSelection
from gguf_mtp.placement.settle import CheckedPlan, block_options, target_options
from gguf_mtp.types import Drafter


@dataclass(frozen=True, slots=True)
class BuildSpec:
    """What is to be put together: a placement, who drafts, and how it runs. `beside`: the placement
    of a draft model."""

    settled: CheckedPlan
    lineup: DrafterSelection
    n_threads: int
    strict: bool
    beside: CheckedPlan | None = None

    def context(self, options: ContextOptions) -> ContextOptions:
        return replace(options, strict=self.strict)


class BuiltModel(NamedTuple):
    """`block` is the model that holds the MTP block, where one drafts: `model` or another file."""

    model: Model
    block: Model | None
    target: Context
    drafters: list[Drafter]


def build(frame: BuildSpec, stack: ExitStack) -> BuiltModel:
    """Loads every model and makes every context; `stack` frees them.

    Raises `LoadFailed`.
    """
    settled, lineup = frame.settled, frame.lineup
    for endpoint in settled.wishes.rpc:
        connect(endpoint)
    options = settled.options(load_mtp=lineup.uses_own_block)
    model = stack.enter_context(Model(settled.subject.facts.path, options))
    block = model if lineup.uses_own_block else None
    if lineup.side is not None:
        block = stack.enter_context(Model(lineup.side.path, settled.side_options()))
    target = _target(frame, model, reads_hidden=block is not None)
    drafters = [DRAFTERS[name](frame, block, stack) for name in lineup.names]
    return BuiltModel(model, block, target, drafters)


def _target(frame: BuildSpec, model: Model, reads_hidden: bool) -> Context:
    contexts, facts = frame.settled.plan.contexts, frame.settled.subject.facts
    wanted = target_options(contexts, frame.n_threads, hidden=reads_hidden)
    try:
        return model.context(frame.context(wanted))
    except LoadFailed as error:
        n_bytes = sum(frame.settled.plan.caches[: facts.n_layer])
        raise LoadFailed(f"{error}; its KV cache needs {n_bytes / 1e6:,.0f} MB") from error


def _ngram(frame: BuildSpec, _block: Model | None, _stack: ExitStack) -> Drafter:
    return NgramDrafter(frame.settled.plan.contexts.n_seq)


def _mtp(frame: BuildSpec, block: Model | None, _stack: ExitStack) -> Drafter:
    assert block is not None
    plan = frame.settled.plan
    context = block.context(frame.context(block_options(plan, frame.n_threads)))
    return MtpDrafter(context, plan.contexts.n_seq, plan.contexts.n_draft_batch)


def _model(frame: BuildSpec, _block: Model | None, stack: ExitStack) -> Drafter:
    assert frame.beside is not None
    facts, plan = frame.beside.subject.facts, frame.beside.plan
    model = stack.enter_context(Model(facts.path, frame.beside.options(load_mtp=False)))
    wanted = target_options(plan.contexts, frame.n_threads, hidden=False)
    return ModelDrafter(model.context(frame.context(wanted)), plan.contexts.n_batch)


DRAFTERS: Mapping[str, Callable[[BuildSpec, Model | None, ExitStack], Drafter]] = {
    "ngram": _ngram,
    "mtp": _mtp,
    "model": _model,
}
