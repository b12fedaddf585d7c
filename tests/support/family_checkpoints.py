"""Small checkpoints of other families, with official names and keys; transformers' logits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.checkpoints import Entry, layout, read_all, write


def bf16(values: np.ndarray) -> bytes:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()


def rounded(raw: bytes) -> np.ndarray:
    return (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)


GLM: dict[str, Any] = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": [1, 2, 3],
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 1024,
    "model_type": "glm4_moe_lite",
    "moe_intermediate_size": 48,
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 1.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "vocab_size": 4096,
}


LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "kv_lora_rank": 32,
    "max_position_embeddings": 128,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 48,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 4,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 4,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 32,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 32,
    "vocab_size": 4096,
}

# 16 indexer heads, so that no key's score is exactly 0: among equals each side may choose its own.
V32: dict[str, Any] = LITE | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "index_head_dim": 64,
    "index_n_heads": 16,
    "index_topk": 16,
    "model_type": "deepseek_v32",
    "n_group": 4,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 32,
    "rope_scaling": LITE["rope_scaling"] | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 1.8,
    "scoring_func": "sigmoid",
    "topk_group": 2,
    "topk_method": "noaux_tc",
}


def indexer(config: Mapping[str, Any]) -> list[Entry]:
    """V3.2's indexer in every layer, the MTP block's included."""
    d, n, d_index = config["hidden_size"], config["index_n_heads"], config["index_head_dim"]
    found = []
    for i in range(config["num_hidden_layers"] + 1):
        name = f"model.layers.{i}.self_attn.indexer."
        found += [
            Entry(f"{name}k_norm.weight", "F32", (d_index,)),
            Entry(f"{name}k_norm.bias", "F32", (d_index,)),
            Entry(f"{name}weights_proj.weight", "BF16", (n, d)),
            Entry(f"{name}wk.weight", "BF16", (d_index, d)),
            Entry(f"{name}wq_b.weight", "BF16", (n * d_index, config["q_lora_rank"])),
        ]
    return found


def entries(config: Mapping[str, Any]) -> list[Entry]:
    """The release's tensors: V3's names in BF16, without what the family has not."""
    q_rank = config["q_lora_rank"]
    named = layout(dict(config) | {"q_lora_rank": q_rank or 1})
    plain = [e if e.dtype == "F32" else e._replace(dtype="BF16") for e in named]
    kept = [e for e in plain if not e.name.endswith("_scale_inv")]
    if q_rank is not None:
        return kept + (indexer(config) if "index_topk" in config else [])
    n_layer, n_query = config["num_hidden_layers"], config["num_attention_heads"] * 40
    lite = [
        Entry(e.name.replace("q_b_proj", "q_proj"), "BF16", (n_query, config["hidden_size"]))
        if ".q_b_proj." in e.name
        else e
        for e in kept
        if ".q_a_" not in e.name and "e_score" not in e.name
    ]
    return [e for e in lite if not e.name.startswith(f"model.layers.{n_layer}.")]


def random_checkpoint(folder: Path, config: Mapping[str, Any]) -> Path:
    rng = np.random.default_rng(7)

    def fill(entry: Entry) -> bytes:
        values = rng.standard_normal(entry.shape).astype(np.float32)
        if "norm.bias" in entry.name or "e_score" in entry.name:
            values *= 0.1
        elif "norm" in entry.name:
            values = 1 + 0.1 * values
        else:
            values *= 1.5 / np.sqrt(entry.shape[-1])
        return bf16(values) if entry.dtype == "BF16" else values.astype(np.float32).tobytes()

    return write(folder, config, entries(config), fill, n_shards=2)


def pytorch_logits(folder: Path, config: Mapping[str, Any], tokens: list[int]) -> np.ndarray:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    given = {k: v for k, v in config.items() if k not in ("architectures", "model_type")}
    torch.manual_seed(0)
    for_type = AutoConfig.for_model(config["model_type"], **given)
    model = AutoModelForCausalLM.from_config(for_type, attn_implementation="eager").float().eval()
    weights = {
        name: torch.from_numpy(
            np.array(rounded(raw) if entry.dtype == "BF16" else np.frombuffer(raw, np.float32))
        ).view(entry.shape)
        for name, (entry, raw) in read_all(folder).items()
    }
    state, left = model.state_dict(), dict(weights)
    for name in state:
        if name in left:
            state[name] = left.pop(name)
        elif "experts.gate_up_proj" in name or "experts.down_proj" in name:
            state[name] = _stacked(name, left, config["n_routed_experts"])
    mtp = f"model.layers.{config['num_hidden_layers']}."
    assert not [n for n in left if not n.startswith(mtp)]
    model.load_state_dict(state)
    with torch.no_grad():
        logits: np.ndarray = model(torch.tensor([tokens])).logits[0].numpy()
    return logits


def _stacked(name: str, left: dict[str, Any], n_expert: int) -> Any:
    import torch

    layer = name.split("mlp.")[0]

    def take(part: str) -> Any:
        return [left.pop(f"{layer}mlp.experts.{e}.{part}_proj.weight") for e in range(n_expert)]

    if "down" in name:
        return torch.stack(take("down"))
    both = zip(take("gate"), take("up"), strict=True)
    return torch.stack([torch.cat(pair) for pair in both])
