"""The official releases at full size, headers only: every tensor of each meets a known end.

Names, shapes and dtypes are built from the official configuration; the number of tensors and of
bytes is the release's own, so a wrong name or shape here would not add up.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gguf_mtp.converters.checkpoint import Checkpoint
from gguf_mtp.converters.families import adapt
from gguf_mtp.converters.mla import Choices
from gguf_mtp.converters.tensors import Adapted
from tests.support import v4_checkpoints as v4
from tests.support.checkpoints import V3, Entry, holes, layout, write

YARN = V3["rope_scaling"]


def in_bf16(entries: list[Entry]) -> list[Entry]:
    plain = [e if e.dtype == "F32" else e._replace(dtype="BF16") for e in entries]
    return [e for e in plain if not e.name.endswith("_scale_inv")]


def trunk(config: dict[str, Any], entries: list[Entry]) -> list[Entry]:
    return [e for e in entries if f"layers.{config['num_hidden_layers']}." not in e.name]


def v32(config: dict[str, Any]) -> list[Entry]:
    entries = [e._replace(dtype="F32") if "norm" in e.name else e for e in layout(config)]
    d, n, d_index = config["hidden_size"], config["index_n_heads"], config["index_head_dim"]
    for i in range(config["num_hidden_layers"] + 1):
        indexer = f"model.layers.{i}.self_attn.indexer."
        rows, rank = n * d_index, config["q_lora_rank"]
        entries += [
            Entry(f"{indexer}wq_b.weight", "F8_E4M3", (rows, rank)),
            Entry(f"{indexer}wq_b.weight_scale_inv", "F32", (rows // 128, rank // 128)),
            Entry(f"{indexer}wk.weight", "F8_E4M3", (d_index, d)),
            Entry(f"{indexer}wk.weight_scale_inv", "F32", (1, d // 128)),
            Entry(f"{indexer}k_norm.weight", "F32", (d_index,)),
            Entry(f"{indexer}k_norm.bias", "F32", (d_index,)),
            Entry(f"{indexer}weights_proj.weight", "BF16", (n, d)),
        ]
    return entries


def kimi(config: dict[str, Any]) -> list[Entry]:
    return trunk(config, layout(config)) + [
        Entry(f"model.layers.{i}.self_attn.rotary_emb.inv_freq", "BF16", (56,)) for i in range(61)
    ]


def lite(config: dict[str, Any]) -> list[Entry]:
    kept = trunk(config, in_bf16(layout(config | {"q_lora_rank": 1})))
    kept = [e for e in kept if ".q_a_" not in e.name and "e_score" not in e.name]
    return [
        Entry(e.name.replace("q_b_proj", "q_proj"), "BF16", (3072, 2048))
        if ".q_b_proj." in e.name
        else e
        for e in kept
    ]


class Release(NamedTuple):
    config: dict[str, Any]
    entries: Callable[[dict[str, Any]], list[Entry]]
    n_tensors: int
    n_bytes: int


V32 = V3 | {
    "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32",
    "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048,
}  # fmt: skip
KIMI = V3 | {
    "model_type": "kimi_k2", "vocab_size": 163840, "first_k_dense_replace": 1,
    "max_position_embeddings": 131072, "n_group": 1, "topk_group": 1, "n_routed_experts": 384,
    "num_attention_heads": 64, "num_key_value_heads": 64, "num_nextn_predict_layers": 0,
    "rope_theta": 50000.0, "routed_scaling_factor": 2.827,
    "rope_scaling": YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
}  # fmt: skip
GLM = {
    "architectures": ["Glm4MoeLiteForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "pad_token_id": 154820, "eos_token_id": [154820, 154827, 154829], "hidden_act": "silu",
    "hidden_size": 2048, "intermediate_size": 10240, "max_position_embeddings": 202752,
    "model_type": "glm4_moe_lite", "moe_intermediate_size": 1536, "topk_method": "noaux_tc",
    "norm_topk_prob": True, "num_attention_heads": 20, "n_group": 1, "topk_group": 1,
    "n_routed_experts": 64, "n_shared_experts": 1, "routed_scaling_factor": 1.8,
    "num_experts_per_tok": 4, "first_k_dense_replace": 1, "num_hidden_layers": 47,
    "num_key_value_heads": 20, "num_nextn_predict_layers": 1, "partial_rotary_factor": 1.0,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000, "dtype": "bfloat16",
    "tie_word_embeddings": False, "q_lora_rank": 768, "kv_lora_rank": 512,
    "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "vocab_size": 154880,
}  # fmt: skip
LITE = {
    "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False, "aux_loss_alpha": 0.001,
    "bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1,
    "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 10944, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "model_type": "deepseek_v2", "moe_intermediate_size": 1408,
    "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2,
    "norm_topk_prob": False, "num_attention_heads": 16, "num_experts_per_tok": 6,
    "num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": None,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000,
    "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 1.0, "scoring_func": "softmax", "tie_word_embeddings": False,
    "topk_group": 1, "topk_method": "greedy", "v_head_dim": 128, "vocab_size": 102400,
}  # fmt: skip
RELEASES = {
    "GLM-4.7-Flash": Release(GLM, lambda c: in_bf16(layout(c)), 9_703, 62_442_983_168),
    "DeepSeek-V2-Lite": Release(LITE, lite, 5_291, 31_412_968_448),
    "DeepSeek-V3.2": Release(V32, v32, 92_425, 689_471_107_200),
    "Kimi-K2": Release(KIMI, kimi, 139_644, 1_029_173_256_720),
}
LARGE = ("DeepSeek-V3.2", "Kimi-K2")


V4_RELEASES = {
    "DeepSeek-V4-Flash": Release(v4.FLASH, lambda c: v4.layout(c), 69_187, 159_609_485_896),
    "DeepSeek-V4-Flash-0731": Release(
        v4.with_dspark(v4.FLASH), lambda c: v4.layout(c, "dspark"), 72_317, 166_878_536_440
    ),
    "DeepSeek-V4-Pro": Release(v4.PRO, lambda c: v4.layout(c), 145_116, 864_704_792_696),
}


@pytest.mark.parametrize(
    "name",
    ["DeepSeek-V4-Flash", *(pytest.param(n, marks=pytest.mark.slow) for n in [*V4_RELEASES][1:])],
)
def test_every_tensor_of_v4_is_accounted_for(tmp_path: Path, name: str) -> None:
    """Of the trunk's file and of the drafter's."""
    release = V4_RELEASES[name]
    entries = release.entries(release.config)
    assert len(entries) == release.n_tensors
    assert sum(e.n_bytes for e in entries) == release.n_bytes
    has_block = "0731" not in name
    with Checkpoint(write(tmp_path / "c", release.config, entries, holes)) as checkpoint:
        trunk = adapt(checkpoint, Choices())
        assert trunk.n_written + trunk.n_merged + len(trunk.dropped) == release.n_tensors
        assert trunk.side == ("mtp" if has_block else "dspark")
        assert all(name.startswith("mtp.") for name in trunk.dropped)
        side = adapt(checkpoint, Choices(mtp="only"))
        assert side.n_written + side.n_merged + len(side.dropped) == release.n_tensors
        if has_block:
            assert side.mtp_block == release.config["num_hidden_layers"]
            both = [t.name for t in (*trunk.tensors, *side.tensors) if t.name.startswith("blk.")]
            assert len(both) == len(set(both))
        else:
            assert side.kv["dflash.target_layers"] == [41, 42, 43]
            assert side.kv["tokenizer.ggml.mask_token_id"] == 128_799
    assert trunk.kv["deepseek4.embedding_length_out"] == 4 * release.config["hidden_size"]
    assert (
        trunk.kv["deepseek4.attention.compress_ratios"]
        == (release.config["compress_ratios"][: release.config["num_hidden_layers"]])
    )


def adapted(folder: Path, release: Release) -> tuple[list[Entry], Adapted]:
    entries = release.entries(release.config)
    with Checkpoint(write(folder, release.config, entries, holes)) as checkpoint:
        return entries, adapt(checkpoint, Choices())


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n in LARGE else n for n in RELEASES],
)  # fmt: skip
def test_every_tensor_of_the_release_is_accounted_for(tmp_path: Path, name: str) -> None:
    release = RELEASES[name]
    entries, made = adapted(tmp_path / "checkpoint", release)
    assert len(entries) == release.n_tensors
    assert sum(e.n_bytes for e in entries) == release.n_bytes
    assert made.n_written + made.n_merged + len(made.dropped) == release.n_tensors
    kv, arch, config = made.kv, made.architecture, release.config
    assert arch == ("deepseek32" if name == "DeepSeek-V3.2" else "deepseek2")
    has_mtp = name in ("GLM-4.7-Flash", "DeepSeek-V3.2")
    assert kv[f"{arch}.block_count"] == config["num_hidden_layers"] + has_mtp
    assert kv.get(f"{arch}.nextn_predict_layers") == (1 if has_mtp else None)
    assert kv[f"{arch}.expert_gating_func"] == (1 if name == "DeepSeek-V2-Lite" else 2)
    assert kv.get(f"{arch}.attention.q_lora_rank") == config["q_lora_rank"]
    assert kv[f"{arch}.attention.key_length"] == config["kv_lora_rank"] + 64
