"""What a context is made with, in llama.cpp's words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import llama_cpp as L

from gguf_mtp.errors import LoadFailed
from gguf_mtp.gguf.ggml_types import TENSOR_TYPES
from gguf_mtp.llama.context_rules import ContextRules
from gguf_mtp.llama.log import Errors

__all__ = ["CACHE_TYPE_NUMBERS", "ContextOptions", "new_context"]

_FLASH = {"auto": -1, "off": 0, "on": 1}
CACHE_TYPE_NUMBERS = {t.name.lower(): number for number, t in TENSOR_TYPES.items()}


@dataclass(frozen=True, slots=True)
class ContextOptions:
    """One context. `n_ctx` is the cells of all `n_seq` sequences together, `n_batch` the most rows
    of one decode, `n_outputs` the most rows with logits. `is_mtp` runs the NextN block instead of
    the trunk; `hidden` puts a hidden row out for every row, `layers` what these layers read
    instead. `strict` makes results independent of
    the batch's shape: F32 KV cache, no flash attention (use one thread and F32 weights with it); it
    overrides `cache_k`, `cache_v` and `flash` ("auto", "on", "off"). Without `kv_offload` the cache
    stays with the CPU; `op_offload` lets large batches copy the CPU's weights to a device. Of a
    model with recurrent layers, `n_rewind` is how many rows of a draft can be dropped, at the price
    of as many more states for each sequence; `n_batch` must be larger than that by 2.
    """

    n_ctx: int
    n_seq: int
    n_batch: int
    n_outputs: int
    n_threads: int
    is_mtp: bool = False
    hidden: bool = False
    layers: tuple[int, ...] = ()
    strict: bool = False
    cache_k: str = "f16"
    cache_v: str = "f16"
    flash: str = "auto"
    kv_offload: bool = True
    op_offload: bool = True
    n_rewind: int = 0


def new_context(
    model: Any, options: ContextOptions, rules: ContextRules, beside: Any = None
) -> Any:
    """A llama_context. `beside`: another one, whose model has the embedding and the head.

    Raises `LoadFailed` with llama.cpp's reason.
    """
    params = L.llama_context_default_params()
    if beside is not None:
        params.ctx_other = beside
    params.n_ctx, params.n_seq_max = options.n_ctx, options.n_seq
    params.n_batch = params.n_ubatch = options.n_batch
    params.n_outputs_max = max(options.n_outputs, options.n_seq)  # fewer than n_seq_max aborts
    params.n_threads = params.n_threads_batch = options.n_threads
    params.offload_kqv, params.op_offload = options.kv_offload, options.op_offload
    params.type_k, params.type_v = (
        CACHE_TYPE_NUMBERS[name] for name in (options.cache_k, options.cache_v)
    )
    params.flash_attn_type = _FLASH[options.flash]
    params.n_rs_seq = options.n_rewind
    if options.n_rewind + 1 >= options.n_batch:  # llama.cpp would abort in the first decode
        raise LoadFailed(
            f"cannot rewind {options.n_rewind} rows with a batch size of {options.n_batch}; "
            "use a larger batch size"
        )
    params.kv_unified, params.swa_full = rules.unified, rules.full_window
    if options.is_mtp:
        params.ctx_type = L.LLAMA_CONTEXT_TYPE_MTP
    if options.strict:
        params.type_k = params.type_v = L.GGML_TYPE_F32
        params.flash_attn_type = L.LLAMA_FLASH_ATTN_TYPE_DISABLED
    with Errors() as errors:
        ctx = L.llama_init_from_model(model, params)
    if not ctx:
        raise LoadFailed(f"cannot create a context of {options.n_ctx} cells: {errors.reason()}")
    return ctx
