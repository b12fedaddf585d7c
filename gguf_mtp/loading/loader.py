"""A path and options in, a `Session` out: the only place where the parts are put together.

Knows what options mean together; decides nothing during generation.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from gguf_mtp.depth import AutoDepth, DepthOptions, depth_for
from gguf_mtp.depth.protocol import Depth
from gguf_mtp.drafters.registry import parse_drafters
from gguf_mtp.engine.config import MAX_THREADS, EngineLimits
from gguf_mtp.engine.engine import Engine
from gguf_mtp.errors import RequestError
from gguf_mtp.gguf import missing_keys, model_facts
from gguf_mtp.gguf.bytes_per_token import kv_per_cell, weights_per_token
from gguf_mtp.loading import depth_cache, first_load
from gguf_mtp.loading.build import BuildSpec, build
from gguf_mtp.loading.cores import physical_cores
from gguf_mtp.loading.select import DrafterSelection, DraftOptions, select_drafters
from gguf_mtp.offload import Contexts, Subject
from gguf_mtp.offload.options import PlacementOptions
from gguf_mtp.placement import context_size
from gguf_mtp.placement.checked_plan import actual_placement, plan_placement
from gguf_mtp.placement.context_size import DRAFT_MAX, N_BATCH, N_CTX, NGRAM_MAX
from gguf_mtp.placement.draft_placement import place_draft_model
from gguf_mtp.session import Session
from gguf_mtp.types import ModelFacts

log = logging.getLogger(__name__)

ROWS_IN_PLACE = 31
"""Of a decode for which llama.cpp leaves the CPU's experts where they are; for more it copies them
to a device (op-offload)."""
IDLE_SHARE = 0.02
"""What idle prefixes may slow the active sequences by."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to run a model. `n_ctx` 0: the model's, at most 8,192; it counts one sequence's tokens.

    `draft` names the drafters (`drafters.registry`), the preferred one first. "auto" takes the MTP
    block where there is one and copies beside it, "mtp" demands the block, "off" never drafts: then
    no block is loaded, nor a context made for it. `draft_model` is a file to draft with: one with
    the MTP block, instead of the model's own, or a smaller model with the same vocabulary; without
    it, a model that has no block takes the `mtp-*.gguf` beside it that belongs to it. `draft_min`
    and `draft_max` bound a draft's length (None: 8, or what suits the model,
    `context_size.draft_max`), `ngram_max` that of a copy where the depth is automatic (recurrent
    models: `draft_max`). `n_threads` 0: one per physical core. `strict` makes
    texts independent of the draft depth to the last bit: F32 KV cache, no flash attention, one
    thread (for files of F32 weights). `placement`: what lies on which device; by default a plan is
    made. `chat_template` takes the place of the file's own; with `parse_special_content` what
    messages hold may name control tokens, as `<｜User｜>`. Raises `RequestError` for values out of
    range.
    """

    n_ctx: int = 0
    n_seq: int = 1
    n_threads: int = 0
    draft: str | Sequence[str] = "auto"
    draft_min: int = 0
    draft_max: int | None = None
    ngram_max: int = NGRAM_MAX
    draft_p_min: float = 0.0
    memory: Path | None = None
    strict: bool = False
    draft_model: Path | None = None
    placement: PlacementOptions = field(default_factory=PlacementOptions)
    chat_template: str | None = None
    parse_special_content: bool = False

    def __post_init__(self) -> None:
        _at_least(self.n_ctx, 0, "the context size")
        _at_least(self.n_seq, 1, "the number of sequences")
        _at_least(self.n_threads, 0, "the number of threads")
        if self.n_threads > MAX_THREADS:
            raise RequestError(
                f"the thread count is {self.n_threads}, but ggml supports at most {MAX_THREADS}"
            )
        parse_drafters(self.draft)
        most = DRAFT_MAX if self.draft_max is None else self.draft_max
        DepthOptions(self.draft_min, most, self.draft_p_min)
        kinds = {self.placement.cache_k, self.placement.cache_v}
        if self.strict and (kinds - {"f16", "f32"} or self.placement.flash == "on"):
            raise RequestError(
                "--strict uses an F32 KV cache without flash attention, so --cache-type-k, "
                "--cache-type-v and --flash-attn on cannot be given with it"
            )
        _at_least(self.ngram_max, 0, "ngram-max")
        for name, value in (("draft-max", most), ("ngram-max", self.ngram_max)):
            if value > N_BATCH // 2:
                raise RequestError(f"{name} is {value}, but must be at most {N_BATCH // 2}")


def load(path: str | Path, options: LoadOptions | None = None) -> Session:
    """Loads a GGUF and makes it ready to answer; a context manager.

    A file that was not loaded here before is first loaded in a child process (`first_load`). Raises
    `LoadFailed` (missing, damaged, no memory), `UnsupportedModel` (cannot run; cannot draft as
    `draft` demands), `RequestError` (options that contradict each other).
    """
    options = options or LoadOptions()
    facts = model_facts.read(path)
    if remark := missing_keys.warning(facts):
        log.warning("%s", remark)
    selection = _select(facts, options)
    bounds = _bounds(facts, selection, options)
    first_load.check(_files(facts, selection))
    n_ctx = options.n_ctx or min(facts.context_length, N_CTX)
    subject = _subject(facts, selection, bounds, options, n_ctx)
    with ExitStack() as stack:
        wanted = _placement_options(options)
        draft = place_draft_model(selection.model, subject.contexts, wanted)
        plan = plan_placement(subject, wanted, draft.plan if draft else None)
        if remark := context_size.warning(facts, n_ctx):
            log.warning("%s", remark)
        n_threads = 1 if options.strict else options.n_threads or physical_cores()
        spec = BuildSpec(plan, selection, n_threads, options.strict, draft)
        model, block, target, drafters = build(spec, stack)
        limits = EngineLimits(
            n_ctx=n_ctx,
            n_seq=options.n_seq,
            n_batch=target.options.n_batch,
            end_tokens=model.vocab.end_tokens,
            fingerprint=_fingerprint([facts, *selection.files.values()], plan.subject.contexts),
            n_idle=_idle_cells(plan.subject),
        )
        depth = _depth(options, bounds, spec, limits.fingerprint, stack)
        engine = Engine(target, drafters, depth, limits)
        placement = actual_placement(plan, model, block)
        if draft is not None:
            placement = placement._replace(draft=draft.plan)
        return Session(
            engine,
            model.vocab,
            facts,
            stack.pop_all(),
            selection.side,
            placement,
            options.chat_template,
            options.parse_special_content,
        )


class _Bounds(NamedTuple):
    """Tokens of a draft, at least and at most, and of a copy; 0 where nothing drafts."""

    least: int = 0
    most: int = 0
    copy: int = 0


def _bounds(facts: ModelFacts, selection: DrafterSelection, options: LoadOptions) -> _Bounds:
    """Raises `RequestError` for a `draft_min` beyond the length that suits the model."""
    if not selection.names:
        return _Bounds()
    most = options.draft_max
    if most is None:
        most = context_size.draft_max(facts, selection.side)
    is_fixed = DepthOptions(options.draft_min, most).is_fixed
    copies = not is_fixed and any(spec.is_free for spec in selection.specs)
    longest = context_size.copies(facts, most, options.ngram_max) if copies else 0
    return _Bounds(options.draft_min, most, longest)


def _select(facts: ModelFacts, options: LoadOptions) -> DrafterSelection:
    """The drafters, checked before anything is loaded."""
    if options.draft_max == 0:
        return DrafterSelection()
    is_fixed = options.draft_min == options.draft_max
    return select_drafters(facts, DraftOptions(options.draft, options.draft_model, is_fixed))


def _files(facts: ModelFacts, selection: DrafterSelection) -> list[first_load.FirstLoad]:
    """Every file that will be loaded."""
    files = [first_load.FirstLoad(facts, selection.uses_own_block)]
    if selection.side is not None:
        # Stages have no embedding: alone there is nothing to decode with them.
        files.append(first_load.FirstLoad(selection.side, with_block=selection.block is None))
    if selection.model is not None:
        files.append(first_load.FirstLoad(selection.model, with_block=False))
    return files


def _placement_options(options: LoadOptions) -> PlacementOptions:
    if not options.strict:
        return options.placement
    return replace(options.placement, cache_k="f32", cache_v="f32", flash="off")


def _subject(
    facts: ModelFacts,
    selection: DrafterSelection,
    bounds: _Bounds,
    options: LoadOptions,
    n_ctx: int,
) -> Subject:
    sizes = context_size.contexts(
        n_ctx,
        options.n_seq,
        bounds.most,
        selection.has_block,
        options.placement.n_batch,
        bounds.copy,
    )
    return Subject(facts, context_size.with_states(sizes, facts, bounds.most), selection.side)


def _depth(
    options: LoadOptions, bounds: _Bounds, spec: BuildSpec, fingerprint: str, stack: ExitStack
) -> Depth:
    """The depth decision; what it learns is stored when `stack` closes."""
    drafts = bool(spec.selection.names)
    shape = spec.selection.block
    blocks = {} if shape is None else {spec.selection.block_drafter: shape.size}
    plan = spec.plan.plan
    free = bounds.copy
    if plan.copies_experts:
        free = min(free, ROWS_IN_PLACE - 1)
    wanted = DepthOptions(
        bounds.least,
        bounds.most,
        options.draft_p_min,
        blocks,
        free if drafts else None,
        plan.contexts.n_outputs,
    )
    depth = depth_for(wanted)
    if options.memory and isinstance(depth, AutoDepth):
        where = spec.plan.where
        file = depth_cache.file_for(
            options.memory, fingerprint, spec.n_threads, where, options.n_seq, bounds.most
        )
        depth_cache.load_depth(depth, file)
        stack.callback(depth_cache.save_depth, depth, file)
    return depth


def _idle_cells(subject: Subject) -> int:
    """How many cells idle prefixes may hold while others decode: attention reads them too, so their
    bytes stay within `IDLE_SHARE` of the bytes a token reads anyway."""
    contexts = subject.contexts
    per_cell = kv_per_cell(subject.facts, contexts.cache_k, contexts.cache_v) or 1
    return int(IDLE_SHARE * weights_per_token(subject.facts) / per_cell)


def _fingerprint(files: Sequence[ModelFacts | None], contexts: Contexts) -> str:
    """Names the weights, the target's first, and the cache's types; from the headers and samples of
    the data."""
    digest = hashlib.sha256()
    facts = files[0]
    assert facts
    tensors = [tensor for one in files if one for tensor in one.tensors]
    for tensor in tensors:
        digest.update(repr(tensor[:4]).encode())
    for file in sorted({tensor.file for tensor in tensors}):
        with Path(file).open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            for part in range(8):
                stream.seek(size * part // 8)
                digest.update(stream.read(1 << 16))
    kinds = [contexts.cache_k.upper(), contexts.cache_v.upper()]
    kind = kinds[0] if kinds[0] == kinds[1] else "/".join(kinds)
    return f"{facts.name or facts.architecture} {digest.hexdigest()[:16]} with {kind} cache"


def _at_least(value: int, least: int, what: str) -> None:
    if value < least:
        raise RequestError(f"{what} is {value}, but must be {least} or more")
