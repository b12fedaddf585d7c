"""What the pinned llama.cpp asserts for architectures with recurrent layers that draft here.

From `src/models/qwen35.cpp`, `qwen35moe.cpp`, `nemotron-h.cpp`, `nemotron-h-moe.cpp`,
`bailingmoe3.cpp`, and the layers they share (`delta-net-base.cpp`, `mamba-base.cpp`). Their MTP
blocks are layers of attention, and `nextn` asks for the same parts in all. Shapes are the loader's
to check.
"""

from __future__ import annotations

from gguf_mtp.gguf.arch.nextn import why_no_experts, why_not_heads, why_not_rotate
from gguf_mtp.gguf.cache_layout import kept
from gguf_mtp.gguf.header import Header
from gguf_mtp.gguf.hparams import Hparams

__all__ = ["why_not_run"]


def why_not_run(header: Header, hparams: Hparams) -> str | None:
    """What would abort the process in a plain run, or None."""
    if hparams.arch == "bailingmoe3":
        return _why_not_kda(hparams)
    why = why_no_experts(hparams) or why_not_heads(hparams) or _why_not_state(hparams)
    if why is None and hparams.arch.startswith("qwen"):
        why = why_not_rotate(hparams) or _why_no_sections(hparams)
        why = why or _missing_of_delta_net(header, hparams)
    return why


def _why_no_sections(hparams: Hparams) -> str | None:
    """RoPE in sections, for time, height and width."""
    sections, head = hparams.get("rope.dimension_sections"), hparams.count("attention.key_length")
    if not isinstance(sections, list) or not any(sections[:3]) or sum(sections) > head:
        return (
            f"its rope.dimension_sections are {sections}, but must have some dimensions and no "
            f"more than the {head} of a head"
        )
    return None


def _missing_of_delta_net(header: Header, hparams: Hparams) -> str | None:
    """Tensors that the loader takes as optional, and the graph reads."""
    n_layer = hparams.count("block_count") - hparams.count("nextn_predict_layers", 0)
    names = {tensor.name for tensor in header.tensors}
    for layer, what in enumerate(kept(hparams.kv, hparams.arch, n_layer)):
        for part in ("attn_qkv", "attn_gate") if what == "state" else ():
            if f"blk.{layer}.{part}.weight" not in names:
                return f"blk.{layer}.{part}.weight is missing"
    return None


def _why_not_state(hparams: Hparams) -> str | None:
    n_head, inner = hparams.count("ssm.time_step_rank"), hparams.count("ssm.inner_size")
    n_group, size = hparams.count("ssm.group_count"), hparams.count("ssm.state_size")
    is_delta_net = hparams.arch.startswith("qwen")
    splits = n_group and n_head and not (n_head % n_group or inner % n_head or inner % n_group)
    if not splits or (is_delta_net and inner != n_head * size):
        return (
            f"its recurrent layers cannot split {inner} values into {n_head} heads of state size "
            f"{size} and {n_group} groups"
        )
    return None


def _why_not_kda(hparams: Hparams) -> str | None:
    is_bounded = hparams.get("kda.gate_lower_bound", 0.0) < 0  # not of a NaN
    if not hparams.get("kda.safe_gate", True) or not is_bounded:
        return "its recurrent layers have no bounded gate (kda.safe_gate, kda.gate_lower_bound < 0)"
    if hparams.get("expert_gating_func", 1) == 0:
        return "its experts' gating function is 0, but must be named"
    cached = hparams.count("attention.key_length", 0)
    needed = hparams.count("attention.kv_lora_rank") + hparams.count("rope.dimension_count")
    if cached != needed:
        return f"its cache holds keys of {cached} values, but its attention writes {needed}"
    n_layer = hparams.count("block_count") - hparams.count("nextn_predict_layers", 0)
    if hparams.count("kda.head_dim") == 0 and "state" in kept(hparams.kv, hparams.arch, n_layer):
        return "its kda.head_dim is 0"
    return None
