"""Loads models, makes contexts and builds drafters, as planned and selected.

Decides nothing, and knows no drafter by name.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import NamedTuple

from gguf_mtp.drafters.spec import DraftContext
from gguf_mtp.errors import LoadFailed
from gguf_mtp.llama import Context, ContextOptions, Model, connect
from gguf_mtp.loading.hidden_rows import check_hidden_rows
from gguf_mtp.loading.select import DrafterSelection
from gguf_mtp.placement.checked_plan import CheckedPlan, block_options, target_options
from gguf_mtp.types import Drafter


@dataclass(frozen=True, slots=True)
class BuildSpec:
    """What to build: where the model goes, which drafters it gets, and how it runs. `draft_plan` is
    the placement of a draft model."""

    plan: CheckedPlan
    selection: DrafterSelection
    n_threads: int
    strict: bool
    draft_plan: CheckedPlan | None = None

    def context(self, options: ContextOptions) -> ContextOptions:
        return replace(options, strict=self.strict)


class BuiltModel(NamedTuple):
    """`block` is the model that holds the MTP block or the stages, where these draft: `model` or
    another file."""

    model: Model
    block: Model | None
    target: Context
    drafters: list[Drafter]


def build(spec: BuildSpec, stack: ExitStack) -> BuiltModel:
    """Loads every model and makes every context; `stack` frees them.

    Raises `LoadFailed`.
    """
    plan, selection = spec.plan, spec.selection
    for endpoint in plan.options.rpc:
        connect(endpoint)
    options = plan.model_options(load_mtp=selection.uses_own_block)
    model = stack.enter_context(Model(plan.subject.facts.path, options))
    block = model if selection.uses_own_block else None
    if selection.side is not None:
        block = stack.enter_context(Model(selection.side.path, plan.side_options()))
    target = _target(spec, model, reads_hidden=block is not None)
    if block is not None:
        check_hidden_rows(target, plan.subject.facts.path)
    parts = _Parts(spec, block, target, stack)
    return BuiltModel(model, block, target, [one.build(parts) for one in selection.specs])


def _target(spec: BuildSpec, model: Model, reads_hidden: bool) -> Context:
    contexts, facts = spec.plan.plan.contexts, spec.plan.subject.facts
    shape = spec.selection.block
    wanted = target_options(contexts, spec.n_threads, reads_hidden, shape)
    try:
        return model.context(spec.context(wanted))
    except LoadFailed as error:
        n_bytes = sum(spec.plan.plan.caches[: facts.n_layer])
        raise LoadFailed(f"{error}; its KV cache needs {n_bytes / 1e6:,.0f} MB") from error


class _Parts:
    """See `drafters.spec.DraftParts`."""

    def __init__(
        self, spec: BuildSpec, block: Model | None, target: Context, stack: ExitStack
    ) -> None:
        self._spec, self._block, self._target, self._stack = spec, block, target, stack

    @property
    def n_seq(self) -> int:
        return self._spec.plan.plan.contexts.n_seq

    def block(self) -> DraftContext:
        assert self._block is not None
        plan, selection = self._spec.plan.plan, self._spec.selection
        shape = selection.block
        options = self._spec.context(block_options(plan, self._spec.n_threads, shape))
        context = (
            self._block.context(options)
            if shape is None
            else self._block.block_context(options, self._target, shape.size)
        )
        return DraftContext(context, options.n_batch, selection.side)

    def model(self) -> DraftContext:
        draft = self._spec.draft_plan
        assert draft is not None
        options = draft.model_options(load_mtp=False)
        model = self._stack.enter_context(Model(draft.subject.facts.path, options))
        wanted = target_options(draft.plan.contexts, self._spec.n_threads, hidden=False)
        return DraftContext(model.context(self._spec.context(wanted)), draft.plan.contexts.n_batch)
