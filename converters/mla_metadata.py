"""`Hyperparameters` -> the metadata keys of llama.cpp's MLA graphs, without their prefix.

What each key means was read in llama.cpp's `deepseek2` loader.
"""

from __future__ import annotations

from .mla_config import LITE_DEPTHS, Hyperparameters
from .tensors import Value


def metadata(h: Hyperparameters, has_mtp: bool) -> dict[str, Value]:
    kv: dict[str, Value] = {
        "block_count": h.n_layer + has_mtp,
        "context_length": h.n_ctx,
        "embedding_length": h.n_embd,
        "feed_forward_length": h.n_ff,
        "vocab_size": h.n_vocab,
        "leading_dense_block_count": h.n_dense,
        "attention.head_count": h.n_head,
        "attention.head_count_kv": 1,  # all heads share one compressed key and value
        "attention.layer_norm_rms_epsilon": h.rms_eps,
        "attention.kv_lora_rank": h.kv_rank,
        "attention.key_length": h.kv_rank + h.d_rope,
        "attention.value_length": h.kv_rank,
        "attention.key_length_mla": h.d_nope + h.d_rope,
        "attention.value_length_mla": h.d_v,
        "rope.dimension_count": h.d_rope,
        "rope.freq_base": h.rope_base,
        "expert_feed_forward_length": h.n_ff_expert,
        "expert_count": h.n_expert,
        "expert_used_count": h.n_expert_used,
        "expert_shared_count": h.n_shared,
        "expert_weights_scale": h.routed_scale,
        "expert_weights_norm": h.normalise,
        "expert_gating_func": h.gating,
        "expert_group_count": h.n_group,
        "expert_group_used_count": h.n_group_used,
    }
    if h.q_rank or h.n_layer not in LITE_DEPTHS:
        kv["attention.q_lora_rank"] = h.q_rank
    if h.yarn:
        kv |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": h.yarn.factor,
            "rope.scaling.original_context_length": h.yarn.n_ctx,
            "rope.scaling.yarn_beta_fast": h.yarn.beta_fast,
            "rope.scaling.yarn_beta_slow": h.yarn.beta_slow,
            # For this architecture the loader divides by 0.1 again.
            "rope.scaling.yarn_log_multiplier": 0.1 * h.yarn.mscale,
        }
    if has_mtp:
        kv["nextn_predict_layers"] = 1
    return kv
