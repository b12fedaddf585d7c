"""MTP blocks of other architectures: what the pinned llama.cpp asserts for each that has a graph.

The drafter itself is the same: it hands on hidden rows and tokens. What differs is the target's
cache: one with a sliding window cannot always drop rejected rows, so those do not draft here; one
with recurrent layers can where `layers` says so. The block itself is a layer of attention in all.
Source: `src/models/glm4-moe.cpp`, `hy-v3.cpp` and `llama_model::create_memory`; for recurrent ones
see `recurrent`.
"""

from __future__ import annotations

from collections.abc import Mapping

from gguf_mtp.gguf.cache_layout import why_no_draft
from gguf_mtp.gguf.header import Header
from gguf_mtp.gguf.hparams import Hparams

__all__ = [
    "GRAPHS",
    "why_no_experts",
    "why_not_draft",
    "why_not_heads",
    "why_not_known",
    "why_not_rotate",
    "why_not_run",
]

GRAPHS = ("glm4moe", "hy_v3")
"""Architectures with an MTP graph over a plain attention cache."""

_WINDOW = "its sliding-window cache cannot always drop rejected draft tokens"
OTHERS: Mapping[str, str] = {
    "mimo2": _WINDOW,
    "step35": _WINDOW,
    "cohere2moe": _WINDOW,
}
"""Architectures whose MTP graph llama.cpp has, and why they do not draft here; recurrent ones are
in `layers`."""


def why_not_known(hparams: Hparams) -> str:
    """Why an architecture without checks here does not draft."""
    unknown = "this release supports no MTP graph of llama.cpp for this architecture"
    return why_no_draft(hparams.kv, hparams.arch) or OTHERS.get(hparams.arch, unknown)


def why_not_run(_: Header, hparams: Hparams) -> str | None:
    """What would abort the process in a plain run, or None."""
    hparams.count("attention.head_count_kv", 0)  # equal in all layers
    return why_not_heads(hparams) or why_not_rotate(hparams) or why_no_experts(hparams)


def why_not_heads(hparams: Hparams) -> str | None:
    """Attention without MLA has keys as wide as values."""
    key, value = (hparams.count(f"attention.{part}_length", 0) for part in ("key", "value"))
    if key == value:
        return None
    return f"its heads have {key} key and {value} value dimensions, but the two must be equal"


def why_not_rotate(hparams: Hparams) -> str | None:
    """RoPE turns a part of each head, or all of it."""
    head = hparams.count("attention.key_length", 0)
    n_rot = hparams.count("rope.dimension_count", head)
    if 0 < n_rot <= head:
        return None
    return f"RoPE cannot rotate {n_rot} of the {head} dimensions of a head"


def why_no_experts(hparams: Hparams) -> str | None:
    """A mixture of experts, by its name, must have some."""
    is_without = hparams.arch.endswith("moe") and not hparams.count("expert_count", 0)
    return "it has no experts" if is_without else None


def why_not_draft(header: Header, hparams: Hparams) -> str | None:
    """What keeps the file's MTP block from drafting, or None. Shapes are the loader's to check."""
    n_mtp = hparams.count("nextn_predict_layers")
    if n_mtp != 1:
        return f"the file has {n_mtp} MTP blocks, but drafting needs exactly one"
    n_layer = hparams.count("block_count") - 1
    names = {tensor.name for tensor in header.tensors}
    for part in ("eh_proj", "enorm", "hnorm"):
        if f"blk.{n_layer}.nextn.{part}.weight" not in names:
            return (
                f"the header declares an MTP block, but blk.{n_layer}.nextn.{part}.weight "
                "is missing"
            )
    if f"blk.{n_layer}.ffn_gate_inp.weight" not in names and hparams.arch.endswith("moe"):
        return f"the MTP block blk.{n_layer} must have experts, but is a dense layer"
    return None
