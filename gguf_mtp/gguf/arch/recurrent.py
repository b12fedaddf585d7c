"""What the pinned llama.cpp asserts for architectures with recurrent layers that draft here.

From `src/models/qwen35.cpp`, `qwen35moe.cpp`, `nemotron-h.cpp`, `nemotron-h-moe.cpp`,
`bailingmoe3.cpp`, and the layers they share (`delta-net-base.cpp`, `mamba-base.cpp`). Their MTP
blocks are layers of attention, and `nextn` asks for the same parts in all. Shapes are the loader's
to check.
"""

from __future__ import annotations

from gguf_mtp.gguf.arch.nextn import why_no_experts, why_not_heads
from gguf_mtp.gguf.cache_layout import kept
from gguf_mtp.gguf.header import Header
from gguf_mtp.gguf.hparams import Hparams

__all__ = ["why_not_run"]


def why_not_run(_: Header, hparams: Hparams) -> str | None:
    """What would abort the process in a plain run, or None."""
    if hparams.arch == "bailingmoe3":
        return _why_not_kda(hparams)
    return why_no_experts(hparams) or why_not_heads(hparams) or _why_not_state(hparams)


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
    if not hparams.get("kda.safe_gate", True) or hparams.get("kda.gate_lower_bound", 0.0) >= 0:
        return "its recurrent layers have no bounded gate (kda.safe_gate, kda.gate_lower_bound < 0)"
    cached = hparams.count("attention.key_length", 0)
    needed = hparams.count("attention.kv_lora_rank") + hparams.count("rope.dimension_count")
    if cached != needed:
        return f"its cache holds keys of {cached} values, but its attention writes {needed}"
    n_layer = hparams.count("block_count") - hparams.count("nextn_predict_layers", 0)
    if hparams.count("kda.head_dim") == 0 and "state" in kept(hparams.kv, hparams.arch, n_layer):
        return "its kda.head_dim is 0"
    return None
