"""DeepSeek-V4 checkpoints: the official names, shapes and dtypes at any size, and random values.

What `mtp.*` holds is an MTP block, or the three stages of DSpark, or nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tests.support.checkpoints import Entry, write

Drafter = Literal["mtp", "dspark", "none"]

FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"], "bos_token_id": 0, "eos_token_id": 1,
    "expert_dtype": "fp4", "hc_eps": 1e-6, "hc_mult": 4, "hc_sinkhorn_iters": 20, "head_dim": 512,
    "hidden_act": "silu", "hidden_size": 4096, "index_head_dim": 128, "index_n_heads": 64,
    "index_topk": 512, "max_position_embeddings": 1048576, "model_type": "deepseek_v4",
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 6,
    "num_hidden_layers": 43, "num_hash_layers": 3, "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1, "o_groups": 8, "o_lora_rank": 1024, "q_lora_rank": 1024,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000,
    "compress_rope_theta": 160000, "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus",
    "sliding_window": 128, "swiglu_limit": 10.0, "tie_word_embeddings": False,
    "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "vocab_size": 129280,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
        "scale_fmt": "ue8m0", "weight_block_size": [128, 128],
    },
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 16, "original_max_position_embeddings": 65536,
        "type": "yarn",
    },
}  # fmt: skip
PRO: dict[str, Any] = FLASH | {
    "hidden_size": 7168, "index_topk": 1024, "moe_intermediate_size": 3072,
    "n_routed_experts": 384, "num_attention_heads": 128, "num_hidden_layers": 61,
    "o_groups": 16, "q_lora_rank": 1536, "routed_scaling_factor": 2.5,
    "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
}  # fmt: skip
TINY: dict[str, Any] = FLASH | {
    "head_dim": 128, "hidden_size": 128, "index_head_dim": 64, "index_n_heads": 16,
    "index_topk": 16, "max_position_embeddings": 4096, "moe_intermediate_size": 64,
    "n_routed_experts": 16, "num_attention_heads": 4, "num_experts_per_tok": 4,
    "num_hidden_layers": 6, "o_groups": 2, "o_lora_rank": 32, "q_lora_rank": 64,
    "qk_rope_head_dim": 32, "sliding_window": 32, "vocab_size": 4096,
    "compress_ratios": [0, 0, 4, 128, 4, 128, 0],
    "rope_scaling": FLASH["rope_scaling"] | {"original_max_position_embeddings": 256},
}  # fmt: skip
N_STAGES, MARKOV = 3, 256


def with_dspark(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a release with DSpark: it still names an MTP block."""
    n_layer = config["num_hidden_layers"]
    return config | {
        "compress_ratios": [*config["compress_ratios"], 0, 0],
        "dspark_block_size": 5,
        "dspark_noise_token_id": config["vocab_size"] - 481,
        "dspark_target_layer_ids": [n_layer - 3, n_layer - 2, n_layer - 1],
        "dspark_markov_rank": MARKOV,
    }


def layout(c: dict[str, Any], drafter: Drafter = "mtp") -> list[Entry]:
    d, v, n_layer = c["hidden_size"], c["vocab_size"], c["num_hidden_layers"]
    out = [
        Entry("embed.weight", "BF16", (v, d)),
        Entry("norm.weight", "BF16", (d,)),
        Entry("head.weight", "BF16", (v, d)),
        *_streams("hc_head", c, c["hc_mult"], 1),
    ]
    for i in range(n_layer):
        is_hash = i < c["num_hash_layers"]
        out += _block(f"layers.{i}.", c, c["compress_ratios"][i], is_hash)
    if drafter == "mtp":
        out += [*_block("mtp.0.", c, 0, False), *_streams("mtp.0.hc_head", c, c["hc_mult"], 1)]
        out += [*_fp8("mtp.0.e_proj", d, d), *_fp8("mtp.0.h_proj", d, d)]
        out += [Entry(f"mtp.0.{name}.weight", "BF16", (d,)) for name in ("enorm", "hnorm", "norm")]
    elif drafter == "dspark":
        for i in range(N_STAGES):
            out += _block(f"mtp.{i}.", c, 0, False)
        out += [*_fp8("mtp.0.main_proj", d, 3 * d), Entry("mtp.0.main_norm.weight", "BF16", (d,))]
        last = f"mtp.{N_STAGES - 1}."
        out += [Entry(f"{last}norm.weight", "BF16", (d,))]
        out += _streams(f"{last}hc_head", c, c["hc_mult"], 1)
        out += [Entry(f"{last}markov_head.markov_w{i}.weight", "BF16", (v, MARKOV)) for i in (1, 2)]
        out += [Entry(f"{last}confidence_head.proj.weight", "BF16", (1, d + MARKOV))]
    return out


def _fp8(name: str, rows: int, cols: int) -> Iterator[Entry]:
    yield Entry(f"{name}.weight", "F8_E4M3", (rows, cols))
    yield Entry(f"{name}.scale", "F8_E8M0", (-(-rows // 128), -(-cols // 128)))


def _fp4(name: str, rows: int, cols: int) -> Iterator[Entry]:
    yield Entry(f"{name}.weight", "I8", (rows, cols // 2))
    yield Entry(f"{name}.scale", "F8_E8M0", (rows, cols // 32))


def _streams(name: str, c: dict[str, Any], n_mix: int, n_scale: int) -> Iterator[Entry]:
    yield Entry(f"{name}_fn", "F32", (n_mix, c["hc_mult"] * c["hidden_size"]))
    yield Entry(f"{name}_base", "F32", (n_mix,))
    yield Entry(f"{name}_scale", "F32", (n_scale,))


def _compressor(p: str, d: int, width: int, head: int, ratio: int) -> Iterator[Entry]:
    yield Entry(f"{p}compressor.ape", "F32", (ratio, width))
    yield Entry(f"{p}compressor.wkv.weight", "BF16", (width, d))
    yield Entry(f"{p}compressor.wgate.weight", "BF16", (width, d))
    yield Entry(f"{p}compressor.norm.weight", "BF16", (head,))


def _block(p: str, c: dict[str, Any], ratio: int, is_hash: bool) -> Iterator[Entry]:
    d, head, rank, n_head = (
        c["hidden_size"],
        c["head_dim"],
        c["q_lora_rank"],
        c["num_attention_heads"],
    )
    groups, out_rank, n_expert = c["o_groups"], c["o_lora_rank"], c["n_routed_experts"]
    n_ff, mix = c["moe_intermediate_size"], (2 + c["hc_mult"]) * c["hc_mult"]
    yield Entry(f"{p}attn_norm.weight", "BF16", (d,))
    yield Entry(f"{p}ffn_norm.weight", "BF16", (d,))
    yield Entry(f"{p}attn.attn_sink", "F32", (n_head,))
    yield Entry(f"{p}attn.q_norm.weight", "BF16", (rank,))
    yield Entry(f"{p}attn.kv_norm.weight", "BF16", (head,))
    for name, rows, cols in (
        ("wq_a", rank, d), ("wq_b", n_head * head, rank), ("wkv", head, d),
        ("wo_a", groups * out_rank, n_head * head // groups), ("wo_b", d, groups * out_rank),
    ):  # fmt: skip
        yield from _fp8(f"{p}attn.{name}", rows, cols)
    if ratio:
        width = head * (2 if ratio == 4 else 1)
        yield from _compressor(f"{p}attn.", d, width, head, ratio)
    if ratio == 4:
        index, n_index = c["index_head_dim"], c["index_n_heads"]
        yield from _fp8(f"{p}attn.indexer.wq_b", n_index * index, rank)
        yield Entry(f"{p}attn.indexer.weights_proj.weight", "BF16", (n_index, d))
        yield from _compressor(f"{p}attn.indexer.", d, 2 * index, index, ratio)
    yield from _streams(f"{p}hc_attn", c, mix, 3)
    yield from _streams(f"{p}hc_ffn", c, mix, 3)
    yield Entry(f"{p}ffn.gate.weight", "BF16", (n_expert, d))
    if is_hash:
        yield Entry(f"{p}ffn.gate.tid2eid", "I64", (c["vocab_size"], c["num_experts_per_tok"]))
    else:
        yield Entry(f"{p}ffn.gate.bias", "F32", (n_expert,))
    for e in range(n_expert):
        for part, rows, cols in (("w1", n_ff, d), ("w2", d, n_ff), ("w3", n_ff, d)):
            yield from _fp4(f"{p}ffn.experts.{e}.{part}", rows, cols)
    for part, rows, cols in (("w1", n_ff, d), ("w2", d, n_ff), ("w3", n_ff, d)):
        yield from _fp8(f"{p}ffn.shared_experts.{part}", rows, cols)


def tiny(folder: Path, drafter: Drafter = "mtp", seed: int = 0) -> Path:
    """A small checkpoint of random weights."""
    rng = np.random.default_rng(seed)
    config = with_dspark(TINY) if drafter == "dspark" else TINY
    return write(folder, config, layout(config, drafter), lambda e: _values(e, rng), n_shards=2)


def changed(source: Path, folder: Path, change: dict[str, Any]) -> Path:
    """The same checkpoint with other values in its configuration."""
    folder.mkdir()
    for path in source.iterdir():
        if path.name != "config.json":
            (folder / path.name).symlink_to(path)
    config = json.loads((source / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _values(entry: Entry, rng: np.random.Generator) -> bytes:
    name, shape = entry.name, entry.shape
    if entry.dtype == "F8_E8M0":  # so that a row's values are about one in all
        is_fp4 = ".experts." in name
        return rng.integers(121, 124, shape, np.uint8).tobytes() if is_fp4 else _fill(shape, 117)
    if entry.dtype == "I8":
        return rng.integers(0, 256, shape, np.uint8).tobytes()
    if entry.dtype == "F8_E4M3":  # finite codes of both signs
        return (
            rng.integers(0, 0x70, shape, np.uint8) | rng.integers(0, 2, shape, np.uint8) << 7
        ).tobytes()
    if entry.dtype == "I64":
        experts = np.argsort(rng.random((shape[0], TINY["n_routed_experts"])))
        return experts[:, : shape[1]].astype(np.int64).tobytes()
    values = rng.standard_normal(shape)
    if "norm" in name:
        values = 1 + 0.1 * values
    elif name.endswith(("_scale", "_base", "ape", "bias", "attn_sink")):
        values = (0.7 if name.endswith("_scale") else 0.0) + 0.2 * values
    elif name != "embed.weight":
        values *= (2.0 if name in ("head.weight",) or ".gate." in name else 1.0) / shape[-1] ** 0.5
    return _bf16(values) if entry.dtype == "BF16" else values.astype(np.float32).tobytes()


def _fill(shape: tuple[int, ...], value: int) -> bytes:
    return np.full(shape, value, np.uint8).tobytes()


def _bf16(values: NDArray[np.float64]) -> bytes:
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x8000) >> 16).astype(np.uint16).tobytes()
