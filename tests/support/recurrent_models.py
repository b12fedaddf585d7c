"""Small GGUF files with recurrent layers, random weights, and an MTP block, by architecture.

Shapes are in numpy's order, innermost last. Names and shapes follow llama.cpp's loaders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter

from tests.support.gguf_files import Model as Tiny

Shapes = dict[str, tuple[int, ...]]
D, D_FF, D_HEAD, N_HEAD, N_VOCAB = 64, 96, 32, 2, 300
D_STATE, N_GROUP, N_RANK, CONV = 16, 2, 4, 4
N_EXPERT, N_USED = 4, 2
N_LAYER = 5  # the MTP block included

QWEN: Mapping[str, Any] = {
    "block_count": N_LAYER, "nextn_predict_layers": 1, "context_length": 512,
    "embedding_length": D, "feed_forward_length": D_FF, "attention.head_count": N_HEAD,
    "attention.head_count_kv": 1, "attention.key_length": D_HEAD,
    "attention.value_length": D_HEAD, "rope.dimension_count": 16, "ssm.conv_kernel": CONV,
    "ssm.inner_size": D_STATE * N_RANK, "ssm.state_size": D_STATE,
    "ssm.time_step_rank": N_RANK, "ssm.group_count": N_GROUP, "full_attention_interval": 4,
    "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 10000.0,
    "rope.dimension_sections": [4, 2, 2, 0],
}  # fmt: skip
EXPERTS: Mapping[str, Any] = {
    "expert_count": N_EXPERT, "expert_used_count": N_USED, "expert_feed_forward_length": D_FF,
    "expert_shared_feed_forward_length": D_FF,
}  # fmt: skip


def attention(head: int = D_HEAD, n_query: int = 2 * N_HEAD) -> Shapes:
    """Of Qwen3.5: the query comes with its gate."""
    return {
        "attn_q.weight": (head * n_query, D), "attn_k.weight": (head, D),
        "attn_v.weight": (head, D), "attn_output.weight": (D, head * N_HEAD),
        "attn_q_norm.weight": (head,), "attn_k_norm.weight": (head,),
    }  # fmt: skip


def delta_net() -> Shapes:
    value, both = D_STATE * N_RANK, D_STATE * (2 * N_GROUP + N_RANK)
    return {
        "attn_qkv.weight": (both, D), "attn_gate.weight": (value, D),
        "ssm_conv1d.weight": (both, CONV), "ssm_dt.bias": (N_RANK,), "ssm_a": (N_RANK,),
        "ssm_beta.weight": (N_RANK, D), "ssm_alpha.weight": (N_RANK, D),
        "ssm_norm.weight": (D_STATE,), "ssm_out.weight": (D, value),
    }  # fmt: skip


def dense() -> Shapes:
    return {
        "ffn_gate.weight": (D_FF, D), "ffn_up.weight": (D_FF, D), "ffn_down.weight": (D, D_FF),
    }  # fmt: skip


def experts(shared_gate: bool) -> Shapes:
    found: Shapes = {"ffn_gate_inp.weight": (N_EXPERT, D)}
    for part, shape in {"gate": (D_FF, D), "up": (D_FF, D), "down": (D, D_FF)}.items():
        found[f"ffn_{part}_exps.weight"] = (N_EXPERT, *shape)
        found[f"ffn_{part}_shexp.weight"] = shape
    if shared_gate:
        found["ffn_gate_inp_shexp.weight"] = (D,)
    return found


def nextn(norm: str = "nextn.shared_head_norm") -> Shapes:
    names = ("nextn.enorm", "nextn.hnorm", norm)
    return {f"{name}.weight": (D,) for name in names} | {"nextn.eh_proj.weight": (D, 2 * D)}


def qwen35(i: int) -> Shapes:
    """Three recurrent layers, one of attention, and the block."""
    norms: Shapes = {"attn_norm.weight": (D,), "post_attention_norm.weight": (D,)}
    mixer = delta_net() if i < 3 else attention()
    return norms | mixer | dense() | (nextn() if i == N_LAYER - 1 else {})


def qwen35moe(i: int) -> Shapes:
    own = {k: v for k, v in qwen35(i).items() if not k.startswith("ffn_")}
    return own | experts(shared_gate=True)


def qwen3next(i: int) -> Shapes:
    own = qwen35moe(i)
    if own.pop("ssm_beta.weight", None):
        del own["ssm_alpha.weight"]
        own["ssm_ba.weight"] = (2 * N_RANK, D)
    return own


NEMOTRON_KV = [0, 0, 1, 0, 0, 1]
NEMOTRON: Mapping[str, Any] = EXPERTS | {
    "block_count": 6, "nextn_predict_layers": 1, "context_length": 512, "embedding_length": D,
    "feed_forward_length": [0, D_FF, 0, 0, D_FF, 0], "attention.head_count": N_HEAD,
    "attention.head_count_kv": NEMOTRON_KV, "attention.key_length": D_HEAD,
    "attention.value_length": D_HEAD, "rope.dimension_count": D_HEAD, "ssm.conv_kernel": CONV,
    "ssm.inner_size": D_STATE * N_RANK, "ssm.state_size": D_STATE,
    "ssm.time_step_rank": N_RANK, "ssm.group_count": N_GROUP, "expert_shared_count": 1,
    "expert_weights_norm": True, "expert_weights_scale": 1.5,
    "attention.layer_norm_epsilon": 1e-6, "attention.layer_norm_rms_epsilon": 1e-6,
}  # fmt: skip


def mamba2() -> Shapes:
    inner = D_STATE * N_RANK
    width = inner + 2 * N_GROUP * D_STATE
    return {
        "ssm_in.weight": (inner + width + N_RANK, D), "ssm_conv1d.weight": (width, CONV),
        "ssm_conv1d.bias": (width,), "ssm_dt.bias": (N_RANK,), "ssm_a": (N_RANK, 1),
        "ssm_d": (N_RANK, 1), "ssm_norm.weight": (N_GROUP, inner // N_GROUP),
        "ssm_out.weight": (D, inner),
    }  # fmt: skip


def nemotron_h_moe(i: int) -> Shapes:
    """Layers of one kind each: recurrent, experts, attention, recurrent, experts; and the block."""
    norm: Shapes = {"attn_norm.weight": (D,)}
    mixer = {k: v for k, v in attention(n_query=N_HEAD).items() if "norm" not in k}
    moe = {k: v for k, v in experts(shared_gate=False).items() if "ffn_gate_" not in k}
    moe |= {"ffn_gate_inp.weight": (N_EXPERT, D), "exp_probs_b.bias": (N_EXPERT,)}
    if i == len(NEMOTRON_KV) - 1:
        return norm | {"post_attention_norm.weight": (D,)} | mixer | moe | nextn()
    return norm | (mamba2() if i in (0, 3) else mixer if i == 2 else moe)


NEMOTRON_H: Mapping[str, Any] = {
    **{k: v for k, v in NEMOTRON.items() if "expert" not in k and "nextn" not in k},
    "block_count": 5, "feed_forward_length": NEMOTRON["feed_forward_length"][:5],
    "attention.head_count_kv": NEMOTRON_KV[:5],
}  # fmt: skip


def nemotron_h(i: int) -> Shapes:
    """The dense one, without a block."""
    if i in (1, 4):
        return {"attn_norm.weight": (D,), "ffn_up.weight": (D_FF, D), "ffn_down.weight": (D, D_FF)}
    return nemotron_h_moe(i)


LFM2: Mapping[str, Any] = {
    "block_count": 4, "context_length": 512, "embedding_length": D, "feed_forward_length": D_FF,
    "attention.head_count": N_HEAD, "attention.head_count_kv": [0, 0, 1, 0],
    "rope.freq_base": 10000.0, "shortconv.l_cache": 3, "attention.layer_norm_rms_epsilon": 1e-6,
}  # fmt: skip


def lfm2(i: int) -> Shapes:
    norms: Shapes = {"attn_norm.weight": (D,), "ffn_norm.weight": (D,)}
    conv: Shapes = {
        "shortconv.conv.weight": (D, 3), "shortconv.in_proj.weight": (3 * D, D),
        "shortconv.out_proj.weight": (D, D),
    }  # fmt: skip
    return norms | dense() | (attention(n_query=N_HEAD) if i == 2 else conv)


LORA, ROPE, NOPE, D_KDA = 24, 8, 16, 16
BAILING: Mapping[str, Any] = EXPERTS | {
    "block_count": N_LAYER, "nextn_predict_layers": 1, "context_length": 512,
    "embedding_length": D, "feed_forward_length": D_FF, "attention.head_count": N_HEAD,
    "attention.head_count_kv": [0, 0, 0, 1, 1], "attention.key_length": LORA + ROPE,
    "attention.value_length": LORA, "attention.key_length_mla": NOPE + ROPE,
    "attention.value_length_mla": NOPE, "attention.kv_lora_rank": LORA,
    "rope.dimension_count": ROPE, "rope.freq_base": 10000.0, "ssm.conv_kernel": CONV,
    "kda.head_dim": D_KDA, "kda.gate_lower_bound": -5.0, "expert_shared_count": 1,
    "leading_dense_block_count": 1, "expert_gating_func": 2, "expert_weights_norm": True,
    "attention.layer_norm_rms_epsilon": 1e-6,
}  # fmt: skip


def kda() -> Shapes:
    inner = N_HEAD * D_KDA
    found: Shapes = {f"attn_{part}.weight": (inner, D) for part in "qkv"}
    found |= {f"ssm_conv1d_{part}.weight": (1, inner, 1, CONV) for part in "qkv"}
    return found | {
        "ssm_f_a.weight": (inner, D), "ssm_beta.weight": (N_HEAD, D), "ssm_a": (N_HEAD, 1),
        "ssm_dt.bias": (inner,), "ssm_g_a.weight": (inner, D), "ssm_norm.weight": (D_KDA,),
        "attn_output.weight": (D, inner),
    }  # fmt: skip


def mla() -> Shapes:
    return {
        "attn_q.weight": (N_HEAD * (NOPE + ROPE), D), "attn_kv_a_mqa.weight": (LORA + ROPE, D),
        "attn_kv_a_norm.weight": (LORA,), "attn_k_b.weight": (N_HEAD, LORA, NOPE),
        "attn_v_b.weight": (N_HEAD, NOPE, LORA), "attn_gate.weight": (N_HEAD, D),
        "attn_output.weight": (D, N_HEAD * NOPE),
    }  # fmt: skip


def bailingmoe3(i: int) -> Shapes:
    norms: Shapes = {"attn_norm.weight": (D,), "ffn_norm.weight": (D,)}
    moe = experts(shared_gate=False) | {"exp_probs_b.bias": (N_EXPERT,)}
    own = norms | (kda() if i < 3 else mla()) | (dense() if i == 0 else moe)
    return own | (nextn("layer_output_norm") if i == N_LAYER - 1 else {})


N_HC, N_HASH, D_KEY, D_INDEX, N_INDEX, N_QUERY = 4, 2, 128, 64, 4, 32
RATIOS = [0, 0, 4, 128, 4]
DEEPSEEK4: Mapping[str, Any] = {
    "block_count": N_LAYER, "context_length": 512, "embedding_length": D,
    "attention.head_count": N_HEAD, "attention.head_count_kv": 1, "attention.key_length": D_KEY,
    "attention.value_length": D_KEY, "rope.dimension_count": 32, "rope.freq_base": 10000.0,
    "attention.layer_norm_rms_epsilon": 1e-6, "attention.q_lora_rank": N_QUERY,
    "attention.sliding_window": 16, "expert_shared_count": 1, "expert_count": N_EXPERT,
    "expert_used_count": N_USED, "expert_feed_forward_length": D_FF, "expert_gating_func": 4,
    "expert_weights_scale": 1.5, "expert_weights_norm": True, "swiglu_clamp_exp": [10.0] * N_LAYER,
    "attention.indexer.head_count": N_INDEX, "attention.indexer.key_length": D_INDEX,
    "attention.indexer.top_k": 8, "attention.output_group_count": 2,
    "attention.output_lora_rank": 16, "attention.compress_ratios": RATIOS,
    "attention.compress_rope_freq_base": 160000.0, "hyper_connection.count": N_HC,
    "hyper_connection.sinkhorn_iterations": 20, "hyper_connection.epsilon": 1e-6,
    "hash_layer_count": N_HASH,
}  # fmt: skip


def deepseek4(i: int) -> Shapes:
    mix, ratio = (2 + N_HC) * N_HC, RATIOS[i]
    shapes: Shapes = {
        "attn_norm.weight": (D,), "attn_sinks.weight": (N_HEAD,),
        "attn_q_a.weight": (N_QUERY, D), "attn_q_a_norm.weight": (N_QUERY,),
        "attn_q_b.weight": (N_HEAD * D_KEY, N_QUERY), "attn_kv.weight": (D_KEY, D),
        "attn_kv_a_norm.weight": (D_KEY,), "attn_output_a.weight": (32, N_HEAD * D_KEY // 2),
        "attn_output_b.weight": (D, 32), "ffn_norm.weight": (D,),
        "ffn_gate_inp.weight": (N_EXPERT, D), "ffn_gate_exps.weight": (N_EXPERT, D_FF, D),
        "ffn_up_exps.weight": (N_EXPERT, D_FF, D), "ffn_down_exps.weight": (N_EXPERT, D, D_FF),
        "ffn_gate_shexp.weight": (D_FF, D), "ffn_up_shexp.weight": (D_FF, D),
        "ffn_down_shexp.weight": (D, D_FF),
    }  # fmt: skip
    for part in ("attn", "ffn"):
        shapes |= {f"hc_{part}_fn.weight": (mix, N_HC * D), f"hc_{part}_base.weight": (mix,)}
        shapes[f"hc_{part}_scale.weight"] = (3,)
    if i < N_HASH:
        shapes["ffn_gate_tid2eid.weight"] = (N_VOCAB, N_USED)
    else:
        shapes["exp_probs_b.bias"] = (N_EXPERT,)
    if ratio:
        shapes |= _compressor("attn", D_KEY * (2 if ratio == 4 else 1), D_KEY, ratio)
    if ratio == 4:
        shapes |= _compressor("indexer", 2 * D_INDEX, D_INDEX, ratio)
        shapes["indexer.proj.weight"] = (N_INDEX, D)
        shapes["indexer.attn_q_b.weight"] = (N_INDEX * D_INDEX, N_QUERY)
    return shapes


def _compressor(part: str, width: int, head: int, ratio: int) -> Shapes:
    return {
        f"{part}_compressor_kv.weight": (width, D), f"{part}_compressor_gate.weight": (width, D),
        f"{part}_compressor_ape.weight": (ratio, width), f"{part}_compressor_norm.weight": (head,),
    }  # fmt: skip


Layer = Callable[[int], Shapes]
ARCHITECTURES: Mapping[str, tuple[Mapping[str, Any], Layer]] = {
    "qwen35": (QWEN, qwen35),
    "qwen35moe": (QWEN | EXPERTS, qwen35moe),
    "nemotron_h_moe": (NEMOTRON, nemotron_h_moe),
    "bailingmoe3": (BAILING, bailingmoe3),
    "nemotron_h": (NEMOTRON_H, nemotron_h),
    "lfm2": (LFM2, lfm2),
    "deepseek4": (DEEPSEEK4, deepseek4),
    "qwen3next": (QWEN | EXPERTS, qwen3next),
}


def write(path: Path, arch: str) -> Path:
    """Writes the model and returns its path."""
    hyper, layer = ARCHITECTURES[arch]
    writer, rng = GGUFWriter(path, arch), np.random.default_rng(3)
    for key, value in hyper.items():
        add = {float: writer.add_float32, list: writer.add_array, bool: writer.add_bool}
        add.get(type(value), writer.add_uint32)(f"{arch}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("deepseek-v3")
    writer.add_token_list(Tiny().tokens)
    writer.add_token_types([1] * N_VOCAB)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    shapes: Shapes = {"token_embd.weight": (N_VOCAB, D), "output.weight": (N_VOCAB, D)}
    shapes["token_embd_norm.weight" if arch == "lfm2" else "output_norm.weight"] = (D,)
    if arch == "deepseek4":
        shapes |= {"output_hc_fn.weight": (N_HC, N_HC * D), "output_hc_base.weight": (N_HC,)}
        shapes["output_hc_scale.weight"] = (1,)
    for i in range(int(hyper["block_count"])):
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer(i).items()}
    for name, shape in shapes.items():
        writer.add_tensor(name, _values(name, shape, rng))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _values(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    if "tid2eid" in name:  # experts of each token, all different
        return np.argsort(rng.random((shape[0], N_EXPERT)))[:, : shape[1]].astype(np.int32)
    values = rng.standard_normal(shape)
    if name.endswith("ssm_a"):
        values = -np.exp(values)
    elif "norm" in name:
        values = 1 + 0.1 * values
    else:
        values = values * 1.5 / np.sqrt(shape[-1])
    return values.astype(np.float32)
