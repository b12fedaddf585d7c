"""What the pinned llama.cpp asserts of every file, whatever its architecture: a table of refusals.

From `llama_model_base::load_hparams`, the loader, and the CPU's operators (`ggml-cpu/ops.cpp`): in
each case the process would end, or never come back. What one architecture asserts on top is in
`arch`; what no header shows is found by `loading.first_load`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from gguf_mtp.gguf.header import Header
from gguf_mtp.gguf.hparams import Hparams
from gguf_mtp.types import TensorInfo

__all__ = ["why_not_load"]

MAX_LAYERS, MAX_EXPERTS = 512, 1024  # llama-hparams.h
ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
GATING_FUNCTIONS = range(5)  # LLAMA_EXPERT_GATING_FUNC_TYPE_*; 0 is taken for softmax
LEAST_ALIGNMENT = 32  # TENSOR_ALIGNMENT of ggml's CPU buffers
NO_PRODUCT = frozenset({"F64", "I8", "I16", "I32", "I64", "Q8_1", "Q8_K"})
"""Types without a matrix multiplication on the CPU."""
_INDEX = re.compile(r"tid2eid")
"""Matrices that are looked up, not multiplied."""
_F32 = re.compile(r"(norm\.weight|\.bias|\.ssm_(conv1d\w*|a|d)(\.weight)?)$")
_EPSILONS = ("layer_norm_rms_epsilon", "layer_norm_epsilon", "group_norm_epsilon")


def why_not_load(header: Header, hparams: Hparams) -> str | None:
    """The first thing that llama.cpp would not survive, in a clause, or None."""
    return next(_problems(header, hparams), None)


def _problems(header: Header, hparams: Hparams) -> Iterator[str]:
    yield from _wrong_counts(hparams)
    yield from _wrong_numbers(header, hparams)
    for tensor in header.tensors:
        yield from _wrong_type(tensor)
    if why := _why_not_route(hparams):
        yield why


def _wrong_counts(hparams: Hparams) -> Iterator[str]:
    n_blocks, n_mtp = hparams.count("block_count"), hparams.count("nextn_predict_layers", 0)
    if not 1 <= n_blocks <= MAX_LAYERS:
        yield f"it has {n_blocks} blocks, but llama.cpp takes 1 to {MAX_LAYERS}"
    if n_mtp >= n_blocks:
        yield f"its header declares {n_mtp} MTP blocks, but only {n_blocks} blocks in all"
    if hparams.get("full_attention_interval") == 0:
        yield "its full_attention_interval is 0, but must be at least 1"


def _wrong_numbers(header: Header, hparams: Hparams) -> Iterator[str]:
    scaling = hparams.get("rope.scaling.type", "linear")
    if scaling not in ROPE_SCALINGS:
        yield f"its RoPE scaling {scaling!r} is not one of {', '.join(ROPE_SCALINGS)}"
    n_rot = hparams.largest("rope.dimension_count", 0)
    if n_rot % 2:
        yield f"RoPE rotates pairs of dimensions, but its rope.dimension_count is {n_rot}"
    for name in _EPSILONS:
        value = hparams.get(f"attention.{name}", 0.0)
        if not isinstance(value, float) or not 0 <= value < math.inf:
            yield f"its attention.{name} is {value}, but must be a finite number, 0 or more"
    alignment = header.kv.get("general.alignment", LEAST_ALIGNMENT)
    if alignment < LEAST_ALIGNMENT:
        yield (
            f"its tensors are aligned to {alignment} bytes (general.alignment), but llama.cpp "
            f"needs {LEAST_ALIGNMENT}"
        )


def _wrong_type(tensor: TensorInfo) -> Iterator[str]:
    name, kind = tensor.name, tensor.type
    if _F32.search(name):
        if kind != "F32":
            yield f"{name} is {kind}, but llama.cpp requires F32 there"
    elif kind in NO_PRODUCT and name.endswith(".weight") and not _INDEX.search(name):
        yield f"{name} is {kind}, which llama.cpp cannot multiply"


def _why_not_route(hparams: Hparams) -> str | None:
    n_expert, n_used = hparams.count("expert_count", 0), hparams.largest("expert_used_count", 0)
    n_groups = hparams.count("expert_group_count", 0)
    if hparams.arch.startswith("hunyuan") and n_expert <= 1:
        return None  # the loader takes these for dense models
    if n_expert > MAX_EXPERTS:
        return f"it has {n_expert} experts, but llama.cpp takes at most {MAX_EXPERTS}"
    if n_used > n_expert or (n_expert and not n_used):
        return f"it uses {n_used} of {n_expert} experts"
    gating = hparams.count("expert_gating_func", 0)
    if n_expert and gating not in GATING_FUNCTIONS:
        return f"its experts' gating function is {gating}, which llama.cpp does not support"
    if n_groups and n_groups >= n_expert:
        return f"it has {n_groups} expert groups, but only {n_expert} experts"
    if n_groups > 1:
        n_groups_used = hparams.count("expert_group_used_count", 0)
        if n_expert % n_groups:
            return f"its {n_expert} experts do not divide into {n_groups} groups"
        if not 0 < n_groups_used < n_groups:
            return (
                f"it uses {n_groups_used} of {n_groups} expert groups, but must use at least one "
                "and not all"
            )
    return None
