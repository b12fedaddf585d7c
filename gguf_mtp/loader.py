"""A path and options in, a `Session` out: the only place where the parts are put together.

Knows how large contexts and batches must be for a given number of sequences and draft depth;
decides nothing during generation.
"""

from __future__ import annotations

import hashlib
import logging
import os
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from gguf_mtp import metadata, remembered, sidefile
from gguf_mtp.decision import Depth
from gguf_mtp.depth import AutoDepth, DepthOptions, depth_for
from gguf_mtp.drafters.mtp import FLUSH, MtpDrafter
from gguf_mtp.engine import Engine
from gguf_mtp.errors import LoadFailed, RequestError, UnsupportedModel
from gguf_mtp.limits import EngineLimits
from gguf_mtp.llama import Context, ContextOptions, Model, ModelOptions
from gguf_mtp.session import Session
from gguf_mtp.traffic import kv_per_cell, weights_per_token
from gguf_mtp.types import Drafter, ModelFacts

log = logging.getLogger(__name__)

DraftMode = Literal["auto", "mtp", "off"]

N_CTX = 8192
"""Context when the user names none, or the model's own where that is smaller."""
N_BATCH = 512
"""Rows of a decode: a prompt is read in chunks of this many."""
DRAFT_MAX = 8
"""Draft tokens per round when the user names no bound; the depth decision rarely goes so far."""
IDLE_SHARE = 0.02
"""What idle prefixes may slow the active sequences by."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to run a model. `n_ctx` 0: the model's, at most 8,192; it counts one sequence's tokens.

    `draft_model`: the file whose MTP block drafts, instead of the model's own; without it, a model
    that has none takes the `mtp-*.gguf` beside it that belongs to it.

    `draft`: "auto" drafts when the file can, "mtp" demands it, "off" never does: then neither the
    MTP block is loaded nor a context made for it. `draft_min` and `draft_max` bound a draft's
    length. `n_threads` 0: one per physical core. `strict` makes texts independent of the draft
    depth to the last bit: F32 KV cache, no flash attention, one thread (for files of F32 weights).
    Raises `RequestError` for values out of range.
    """

    n_ctx: int = 0
    n_seq: int = 1
    n_threads: int = 0
    n_gpu_layers: int = -1
    draft: DraftMode = "auto"
    draft_min: int = 0
    draft_max: int = DRAFT_MAX
    draft_p_min: float = 0.0
    memory: Path | None = None
    strict: bool = False
    draft_model: Path | None = None

    def __post_init__(self) -> None:
        _at_least(self.n_ctx, 0, "the context size")
        _at_least(self.n_seq, 1, "the number of sequences")
        _at_least(self.n_threads, 0, "the number of threads")
        DepthOptions(self.draft_min, self.draft_max, self.draft_p_min)
        if self.draft_max > N_BATCH // 2:
            raise RequestError(f"draft-max is {self.draft_max}, but must be at most {N_BATCH // 2}")


def load(path: str | Path, options: LoadOptions | None = None) -> Session:
    """Loads a GGUF and makes it ready to answer; a context manager.

    Raises `LoadFailed` (missing, damaged, no memory), `UnsupportedModel` (cannot run; cannot draft
    though `draft="mtp"`), `RequestError` (options that contradict each other).
    """
    options = options or LoadOptions()
    facts = metadata.read(path)
    side = _side_file(facts, options)
    drafts = side is not None or _will_draft(facts, options)
    n_ctx = options.n_ctx or min(facts.context_length, N_CTX)
    _check_memory(facts, options, n_ctx)
    with ExitStack() as stack:
        own_block = drafts and side is None
        plain = ModelOptions(n_gpu_layers=options.n_gpu_layers)
        model = stack.enter_context(Model(facts.path, replace(plain, load_mtp=own_block)))
        block = model if own_block else None
        if side is not None:
            block = stack.enter_context(Model(side.path, replace(plain, load_mtp=True)))
        try:
            target, drafter = _contexts(model, block, options, n_ctx)
        except LoadFailed as error:
            wanted = n_ctx * options.n_seq * (kv_per_cell(facts, 4 if options.strict else 2) or 0)
            raise LoadFailed(f"{error}; its KV cache wants {wanted / 1e6:,.0f} MB") from error
        limits = EngineLimits(
            n_ctx=n_ctx,
            n_seq=options.n_seq,
            n_batch=target.options.n_batch,
            end_tokens=model.vocab.end_tokens,
            fingerprint=_fingerprint(facts, side, options),
            n_idle=_idle_cells(facts, options),
        )
        depth = _depth(options, drafts, limits.fingerprint, stack)
        engine = Engine(target, [drafter] if drafter else [], depth, limits)
        return Session(engine, model.vocab, facts, stack.pop_all(), side)


def _side_file(facts: ModelFacts, options: LoadOptions) -> ModelFacts | None:
    """The file whose MTP block drafts for this one, if any; checked before anything is loaded."""
    if options.draft == "off" or options.draft_max == 0:
        return None
    if options.draft_model is not None:
        side = sidefile.read(options.draft_model)
        for remark in sidefile.check(facts, side):
            log.info("%s", remark)
        return side
    if facts.can_draft:
        return None
    found, refusals = sidefile.find(facts)
    for refusal in refusals:
        log.warning("%s", refusal)
    if found is not None:
        log.info("drafting with %s, found beside the model", found.path)
    return found


def _will_draft(facts: ModelFacts, options: LoadOptions) -> bool:
    """Whether to load the MTP block. A file without one runs plain; one whose block would make
    llama.cpp abort is refused: it is not what its owner takes it for."""
    if options.draft == "off" or options.draft_max == 0:
        return False
    if facts.can_draft:
        return True
    if options.draft == "mtp":
        raise UnsupportedModel(f"{facts.path} cannot draft: {facts.reason}")
    if facts.n_mtp and facts.architecture in metadata.ARCHITECTURES:
        raise UnsupportedModel(
            f"{facts.path} cannot draft: {facts.reason}; --draft off runs it without its MTP block"
        )
    log.warning("running without drafting: %s", facts.reason)
    return False


def _contexts(
    model: Model, block: Model | None, options: LoadOptions, n_ctx: int
) -> tuple[Context, Drafter | None]:
    """The target's context, and the drafter over its own, made from the model that holds the MTP
    block; sized so that a round is one pass."""
    n_seq = options.n_seq
    n_rows = n_seq * (options.draft_max + 1 if block else 1)  # of a round
    plain = ContextOptions(
        n_ctx=n_ctx * n_seq,
        n_seq=n_seq,
        n_batch=max(N_BATCH, n_rows),
        n_outputs=n_rows,
        n_threads=1 if options.strict else options.n_threads or physical_cores(),
        strict=options.strict,
    )
    target = model.context(replace(plain, hidden=block is not None))
    if block is None:
        return target, None
    n_batch = max(2 * FLUSH, n_rows)
    mtp = block.context(replace(plain, is_mtp=True, n_batch=n_batch, n_outputs=n_seq))
    return target, MtpDrafter(mtp, n_seq, n_batch)


def _depth(options: LoadOptions, drafts: bool, fingerprint: str, stack: ExitStack) -> Depth:
    """The depth decision; what it learns is stored when `stack` closes."""
    most = options.draft_max if drafts else 0
    depth = depth_for(DepthOptions(options.draft_min if drafts else 0, most, options.draft_p_min))
    if options.memory and isinstance(depth, AutoDepth):
        threads = options.n_threads or physical_cores()
        file = remembered.file_for(
            options.memory, fingerprint, threads, options.n_gpu_layers, options.n_seq, most
        )
        remembered.recall(depth, file)
        stack.callback(remembered.remember, depth, file)
    return depth


def _check_memory(facts: ModelFacts, options: LoadOptions, n_ctx: int) -> None:
    """A context far beyond the machine's memory is refused before the system runs out of it."""
    per_cell = kv_per_cell(facts, 4 if options.strict else 2)
    if per_cell is None:
        return  # a width per layer: llama.cpp will say whether it fits
    n_bytes = n_ctx * options.n_seq * per_cell
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if n_bytes > memory:
        raise LoadFailed(
            f"a context of {n_ctx} tokens for {options.n_seq} sequences needs "
            f"{n_bytes / 1e9:.1f} GB, but this machine has {memory / 1e9:.1f} GB; lower -c"
        )


def _idle_cells(facts: ModelFacts, options: LoadOptions) -> int:
    """How many cells idle prefixes may hold while others decode: attention reads them too, so their
    bytes stay within `IDLE_SHARE` of the bytes a token reads anyway."""
    per_cell = kv_per_cell(facts, 4 if options.strict else 2) or 1
    return int(IDLE_SHARE * weights_per_token(facts) / per_cell)


def _fingerprint(facts: ModelFacts, side: ModelFacts | None, options: LoadOptions) -> str:
    """Names the weights and the cache's kind, from the headers and samples of the data."""
    digest = hashlib.sha256()
    tensors = [*facts.tensors, *(side.tensors if side else ())]
    for tensor in tensors:
        digest.update(repr(tensor[:4]).encode())
    for file in sorted({tensor.file for tensor in tensors}):
        with Path(file).open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            for part in range(8):
                stream.seek(size * part // 8)
                digest.update(stream.read(1 << 16))
    kind = "F32" if options.strict else "F16"
    return f"{facts.name or facts.architecture} {digest.hexdigest()[:16]} with {kind} cache"


def physical_cores() -> int:
    """Cores this process may run on, hardware threads of one core counted once."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    if usable is None:
        return max((os.cpu_count() or 2) // 2, 1)
    siblings = set()
    for cpu in usable:
        try:
            path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
            siblings.add(path.read_text())
        except OSError:
            siblings.add(str(cpu))
    return len(siblings)


def _at_least(value: int, least: int, what: str) -> None:
    if value < least:
        raise RequestError(f"{what} is {value}, but must be {least} or more")
