"""What contexts take beside weights: KV cache, compute buffers, output buffers.

Compute buffers are llama.cpp's worst case for a batch of `n_ubatch` rows; the formulas follow its
attention and expert graphs and were compared with what `no_alloc` reports for DeepSeek-V3's shapes
(4,096 to 131,072 cells, 16 to 512 rows, with and without flash attention). They are meant to be a
little too large; where the library can be asked, `check` replaces them by its own answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from gguf_mtp.errors import RequestError
from gguf_mtp.gguf.arch import deepseek4, dflash
from gguf_mtp.gguf.bytes_per_token import kv_widths
from gguf_mtp.gguf.cache_layout import kept, state_bytes
from gguf_mtp.gguf.ggml_types import CACHE_TYPES
from gguf_mtp.gguf.hparams import Hparams
from gguf_mtp.types import ModelFacts

__all__ = ["Contexts", "Rooms", "caches", "rooms"]

F32 = 4
IDLE_BLOCK = ("nemotron_h_moe", "bailingmoe3")
"""Architectures whose target has rows for the MTP block too, which nothing reads."""
CELLS = 256
"""llama.cpp rounds a context up to a multiple of this."""


@dataclass(frozen=True, slots=True)
class Contexts:
    """The two contexts of a run: `n_cells` of all sequences together, `n_batch` rows in a decode of
    the target and `n_draft_batch` in one of the MTP block (0: nothing drafts). `cache_k`, `cache_v`
    name ggml types. `attention` is the user's word ("auto", "on", "off"), `flash` what is reckoned
    with: whether attention runs without a matrix of scores. `insists`: op-offload is not to be
    given up. `n_rewind`: rows that recurrent layers can go back, with a state for each."""

    n_cells: int
    n_seq: int = 1
    n_batch: int = 512
    n_draft_batch: int = 512
    n_outputs: int = 9
    cache_k: str = "f16"
    cache_v: str = "f16"
    attention: str = "auto"
    flash: bool = True
    kv_offload: bool = True
    op_offload: bool = True
    insists: bool = False
    n_rewind: int = 0

    @property
    def drafts(self) -> bool:
        return self.n_draft_batch > 0


@dataclass(frozen=True, slots=True)
class Rooms:
    """Bytes: `caches` of each layer, the MTP block's last; compute buffers of a decode on a device
    that runs whole layers (`full`), on a CPU that runs routed experts only (`experts`) or nothing
    but the embedding (`rest`); and `draft_*` the same of the MTP context. `outputs` lies with the
    host."""

    caches: tuple[int, ...]
    full: int
    experts: int
    rest: int
    draft_full: int
    draft_experts: int
    draft_rest: int
    outputs: int


def rooms(facts: ModelFacts, contexts: Contexts, side: ModelFacts | None = None) -> Rooms:
    """`side` is the file that the MTP block lies in, or stages that draft blocks. Raises
    `RequestError` for a cache type that the model's rows do not fit."""
    n_vocab, n_embd = facts.n_vocab, facts.n_embd
    shape = dflash.shape(side)
    draft, n_seq = contexts.n_draft_batch, contexts.n_seq
    n_drafts = n_seq * (shape.size if shape else 1)  # rows with logits
    trunk = _compute(facts, contexts, contexts.n_batch, contexts.n_outputs)
    states = _states(facts, contexts) if contexts.n_rewind else 0  # all come out of one operator
    trunk = (trunk[0] + states, *trunk[1:])
    drafter = side if side and shape else facts
    block = _compute(drafter, contexts, draft, n_drafts) if draft else (0, 0, 0)
    width = n_embd * (len(shape.layer_inputs) if shape else 1)
    host = contexts.n_outputs * n_vocab + (contexts.n_batch * width if draft else 0)
    if draft:
        host += n_drafts * n_vocab + draft * n_embd
    kept_bytes = caches(facts, contexts)
    if side and shape:
        kept_bytes = (*kept_bytes[:-1], _stages(side, contexts, shape.size))
    return Rooms(kept_bytes, *trunk, *block, host * F32)


def _stages(side: ModelFacts, contexts: Contexts, size: int) -> int:
    """Bytes that stages keep: of every cell, and of the block that is drafted."""
    kind = CACHE_TYPES[contexts.cache_k]
    n_cells = -(-(contexts.n_cells + contexts.n_seq * size) // CELLS) * CELLS
    return dflash.cell_bytes(side, kind.n_bytes / kind.block) * n_cells


def caches(facts: ModelFacts, contexts: Contexts) -> tuple[int, ...]:
    """Bytes that each trunk layer keeps of the tokens before, and last an MTP block: rows for every
    cell, or the states of every sequence. Raises `RequestError` as `rooms`."""
    kv = _kv(facts, contexts)
    if facts.architecture == "deepseek4":
        return _compressed(facts, contexts)
    sizes = {"rows": kv, "state": _states(facts, contexts), "nothing": 0}
    found = [sizes[what] for what in kept(facts.kv, facts.architecture, facts.n_layer)]
    if facts.architecture in IDLE_BLOCK:
        found[-1] += facts.n_mtp * kv
    return (*found, kv)


def _compressed(facts: ModelFacts, contexts: Contexts) -> tuple[int, ...]:
    kind = CACHE_TYPES[contexts.cache_k]
    layers, block = deepseek4.cache_bytes(
        Hparams(facts.kv, facts.architecture, facts.path),
        n_cells=contexts.n_cells // contexts.n_seq,
        n_seq=contexts.n_seq,
        n_batch=contexts.n_batch,
        n_states=1 + contexts.n_rewind,
        value=kind.n_bytes / kind.block,
    )
    return (*layers, block)


def _states(facts: ModelFacts, contexts: Contexts) -> int:
    """Bytes of one recurrent layer's."""
    return contexts.n_seq * (1 + contexts.n_rewind) * state_bytes(facts.kv, facts.architecture)


def _kv(facts: ModelFacts, contexts: Contexts) -> int:
    """Bytes of one layer's cache."""
    widths = kv_widths(facts) or _widest(facts)
    index = facts.kv.get(f"{facts.architecture}.attention.indexer.key_length", 0)
    n_cells = -(-contexts.n_cells // CELLS) * CELLS
    total = 0
    for name, width in ((contexts.cache_k, widths[0] + int(index)), (contexts.cache_v, widths[1])):
        kind = CACHE_TYPES.get(name)
        if kind is None:
            raise RequestError(
                f"cache type {name!r} is not one of {', '.join(sorted(CACHE_TYPES))}"
            )
        if width % kind.block:
            raise RequestError(
                f"cache type {name} stores values in blocks of {kind.block}, but this model's "
                f"cache rows have {width} values"
            )
        total += width // kind.block * kind.n_bytes * n_cells
    return total


def _widest(facts: ModelFacts) -> tuple[int, int]:
    """Key and value widths of the widest layer, where layers differ or the header leaves it to
    llama.cpp."""
    h = Hparams(facts.kv, facts.architecture, facts.path)
    n_head = max(h.largest("attention.head_count", 1), 1)
    n_kv, size = h.largest("attention.head_count_kv", n_head), facts.n_embd // n_head
    key, value = (h.largest(f"attention.{part}_length", size) for part in ("key", "value"))
    return n_kv * key, n_kv * value


def _compute(
    facts: ModelFacts, contexts: Contexts, n_rows: int, n_outputs: int
) -> tuple[int, int, int]:
    """Compute buffers of `n_rows` rows: (whole layers, experts only, embedding only)."""
    h = Hparams(facts.kv, facts.architecture, facts.path)
    n_embd, n_head = facts.n_embd, max(h.largest("attention.head_count", 1), 1)
    n_cells = -(-contexts.n_cells // CELLS) * CELLS
    mask = n_cells * (2 if contexts.flash else 4)
    scores = 0 if contexts.flash else n_head * n_cells * F32
    key = h.largest("attention.key_length", n_embd // n_head)
    value = h.largest("attention.value_length", n_embd // n_head)
    mla_key = h.largest("attention.key_length_mla", key)
    mla_value = h.largest("attention.value_length_mla", value)
    attention = n_head * (mla_key + key + value + mla_value)
    used, n_ff_exp = facts.n_expert_used, h.largest("expert_feed_forward_length", 0)
    routed = used * (2 * n_ff_exp + n_embd) + 4 * n_embd if used else 0
    dense = 3 * h.largest("feed_forward_length", 0)
    # Between devices, the rows at a seam are kept on both sides.
    full = (max(attention, routed, dense) + 6 * n_embd) * F32 + mask + scores
    if facts.architecture == "deepseek4":
        full += deepseek4.row_bytes(h, n_cells // contexts.n_seq)
    elif facts.architecture == dflash.ARCHITECTURE:
        full += deepseek4.stream_bytes(h)
    experts = (routed + used * n_embd) * F32 + mask
    logits = n_outputs * (facts.n_vocab + n_embd) * F32
    return (
        max(n_rows * full, logits),
        n_rows * max(experts, 2 * n_embd * F32 + mask),
        n_rows * (2 * n_embd * F32 + mask),
    )
