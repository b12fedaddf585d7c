"""How large contexts and batches are for a number of sequences and a draft's length.

The same numbers size the run (`loader`) and the plan of a run that may never happen (`plan`).
"""

from __future__ import annotations

from dataclasses import replace

from gguf_mtp.drafters.spec import FLUSH
from gguf_mtp.errors import RequestError
from gguf_mtp.gguf import cache_layout
from gguf_mtp.gguf.arch import dflash
from gguf_mtp.offload.buffers import Contexts
from gguf_mtp.offload.options import PlacementOptions
from gguf_mtp.offload.parts import Subject
from gguf_mtp.types import ModelFacts

__all__ = [
    "DRAFT_MAX",
    "NGRAM_MAX",
    "N_BATCH",
    "N_CTX",
    "contexts",
    "copies",
    "draft_max",
    "warning",
    "with_options",
    "with_states",
]

N_CTX = 8192
"""Context when the user names none, or the model's own where that is smaller."""
N_BATCH = 512
"""Rows of a decode: a prompt is read in chunks of this many."""
DRAFT_MAX = 8
"""Draft tokens per round when the user names no bound; the depth decision rarely goes so far."""
NGRAM_MAX = 48
"""And of a copy, which costs nothing to make."""

_FEW_STATES = {"deepseek4": 3}
"""Draft tokens of models of which every decode writes the states of all rows that could be refused:
room for more of them slows even a decode that drafts nothing."""
_COPIED_ROWS = 128
"""Rows with logits that a decode has room for so that copies may be long: a vocabulary's logits of
each take half a megabyte."""


def warning(facts: ModelFacts, n_ctx: int) -> str | None:
    """What to tell who asks for a longer context than the model knows; None where it does not."""
    if n_ctx <= facts.context_length:
        return None
    return (
        f"a context of {n_ctx:,} tokens is longer than the {facts.context_length:,} that the model "
        "was trained for: beyond them its answers may make no sense"
    )


def draft_max(facts: ModelFacts, side: ModelFacts | None) -> int:
    """How long a draft may be when the user names no bound: a block where `side` drafts blocks, for
    they are made whole."""
    block = dflash.shape(side)
    return block.size if block else _FEW_STATES.get(facts.architecture, DRAFT_MAX)


def contexts(
    n_ctx: int,
    n_seq: int,
    n_draft: int = 0,
    has_block: bool = False,
    n_batch: int = 0,
    n_copy: int = 0,
) -> Contexts:
    """Contexts for `n_seq` sequences of `n_ctx` cells each, in which a round is one pass.

    Drafts have up to `n_draft` tokens, copies up to `n_copy` as far as there is room; `has_block`:
    an MTP block makes some. `n_batch` 0: `N_BATCH`.
    """
    n_rows = n_seq * (n_draft + 1)
    n_outputs = max(n_rows, min(n_seq * (n_copy + 1), _COPIED_ROWS))
    return Contexts(
        n_cells=n_ctx * n_seq,
        n_seq=n_seq,
        n_batch=max(n_batch or N_BATCH, n_outputs),
        n_draft_batch=max(2 * FLUSH, n_rows) if has_block else 0,
        n_outputs=n_outputs,
    )


def copies(facts: ModelFacts, n_draft: int, n_copy: int) -> int:
    """How long a copy may be that may have `n_copy` tokens: where going back takes a state for each
    token, no longer than other drafts."""
    return n_draft if facts.architecture in cache_layout.GOES_BACK else n_copy


def with_states(contexts: Contexts, facts: ModelFacts, n_draft: int) -> Contexts:
    """The same for a model with recurrent layers: a draft of `n_draft` tokens can be refused."""
    if facts.architecture not in cache_layout.GOES_BACK:
        return contexts
    # llama.cpp wants room for a row more than it keeps states.
    return replace(contexts, n_rewind=n_draft, n_batch=max(contexts.n_batch, n_draft + 2))


def with_options(subject: Subject, options: PlacementOptions) -> Contexts:
    """The subject's contexts with the types and switches that the user names. Raises
    `RequestError` for types that the model's cache cannot have."""
    contexts, facts = subject.contexts, subject.facts
    is_one = f"{facts.architecture}.attention.key_length_mla" in facts.kv
    is_one = is_one or facts.architecture == "deepseek4"
    if is_one and options.cache_k != options.cache_v:
        raise RequestError(
            f"{facts.architecture} keeps keys and values in one cache, so --cache-type-k "
            f"{options.cache_k} and --cache-type-v {options.cache_v} must be equal"
        )
    return replace(
        contexts,
        cache_k=options.cache_k,
        cache_v=options.cache_v,
        attention=options.flash,
        flash=options.flash != "off",
        kv_offload=options.kv_offload,
        op_offload=options.op_offload != "off",
        insists=options.op_offload == "on",
    )
