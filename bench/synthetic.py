"""Checkpoints of DeepSeek-V3's layout at any size, with real bytes or with holes.

`layout` lists the official release's names, dtypes and shapes for a configuration; with `V3` it is
the 91,991 tensors of DeepSeek-V3 itself (688,574,839,360 bytes). What fills them is the caller's
choice; a hole reads as zeros and takes no disk.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..demo import CHECKPOINT

SIZE = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "I64": 8}
INDEX = "model.safetensors.index.json"

V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "moe_layer_freq": 1,
    "max_position_embeddings": 163840,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
}


class Entry(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * SIZE[self.dtype]


Fill = Callable[[Entry], bytes | None]
"""The bytes of a tensor; None leaves a hole, which reads as zeros and takes no disk."""


def layout(c: Mapping[str, Any]) -> list[Entry]:
    """Every tensor of the release, MTP block included, in the order of the layers."""
    return [*_root(c), *(e for i in range(c["num_hidden_layers"] + 1) for e in _layer(c, i))]


def _root(c: Mapping[str, Any]) -> Iterator[Entry]:
    d, n_vocab = c["hidden_size"], c["vocab_size"]
    yield Entry("model.embed_tokens.weight", "BF16", (n_vocab, d))
    yield Entry("model.norm.weight", "BF16", (d,))
    yield Entry("lm_head.weight", "BF16", (n_vocab, d))


def _layer(c: Mapping[str, Any], i: int) -> Iterator[Entry]:
    d, n_head, layer = c["hidden_size"], c["num_attention_heads"], f"model.layers.{i}."
    q_rank, kv_rank, d_rope = c["q_lora_rank"], c["kv_lora_rank"], c["qk_rope_head_dim"]
    d_nope, d_v, n_ff = c["qk_nope_head_dim"], c["v_head_dim"], c["moe_intermediate_size"]
    yield Entry(f"{layer}input_layernorm.weight", "BF16", (d,))
    yield Entry(f"{layer}post_attention_layernorm.weight", "BF16", (d,))
    attention = f"{layer}self_attn."
    yield Entry(f"{attention}q_a_layernorm.weight", "BF16", (q_rank,))
    yield Entry(f"{attention}kv_a_layernorm.weight", "BF16", (kv_rank,))
    yield from _fp8(f"{attention}q_a_proj", q_rank, d)
    yield from _fp8(f"{attention}q_b_proj", n_head * (d_nope + d_rope), q_rank)
    yield from _fp8(f"{attention}kv_a_proj_with_mqa", kv_rank + d_rope, d)
    yield from _fp8(f"{attention}kv_b_proj", n_head * (d_nope + d_v), kv_rank)
    yield from _fp8(f"{attention}o_proj", d, n_head * d_v)
    if i < c["first_k_dense_replace"]:
        yield from _mlp(f"{layer}mlp", d, c["intermediate_size"])
        return
    yield Entry(f"{layer}mlp.gate.weight", "BF16", (c["n_routed_experts"], d))
    yield Entry(f"{layer}mlp.gate.e_score_correction_bias", "F32", (c["n_routed_experts"],))
    yield from _mlp(f"{layer}mlp.shared_experts", d, n_ff * c["n_shared_experts"])
    for expert in range(c["n_routed_experts"]):
        yield from _mlp(f"{layer}mlp.experts.{expert}", d, n_ff)
    if i == c["num_hidden_layers"]:
        yield from _nextn(c, layer)


def _nextn(c: Mapping[str, Any], layer: str) -> Iterator[Entry]:
    d, n_vocab = c["hidden_size"], c["vocab_size"]
    yield Entry(f"{layer}eh_proj.weight", "BF16", (d, 2 * d))
    yield Entry(f"{layer}embed_tokens.weight", "BF16", (n_vocab, d))
    yield Entry(f"{layer}shared_head.head.weight", "BF16", (n_vocab, d))
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        yield Entry(f"{layer}{norm}.weight", "BF16", (d,))


def _mlp(name: str, d: int, n_ff: int) -> Iterator[Entry]:
    yield from _fp8(f"{name}.gate_proj", n_ff, d)
    yield from _fp8(f"{name}.up_proj", n_ff, d)
    yield from _fp8(f"{name}.down_proj", d, n_ff)


def _fp8(name: str, rows: int, cols: int) -> Iterator[Entry]:
    yield Entry(f"{name}.weight", "F8_E4M3", (rows, cols))
    yield Entry(f"{name}.weight_scale_inv", "F32", (-(-rows // 128), -(-cols // 128)))


def holes(_: Entry) -> None:
    return None


def write(
    folder: Path, config: Mapping[str, Any], entries: Iterable[Entry], fill: Fill, n_shards: int = 1
) -> Path:
    """A checkpoint in `folder`, with the demo's tokenizer; entries are dealt to shards in order."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = list(entries)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(CHECKPOINT / name, folder / name)
    (folder / "config.json").write_text(json.dumps(config))
    step, index = -(-len(entries) // n_shards), dict[str, str]()
    for i in range(n_shards):
        file = f"model-{i + 1:05d}-of-{n_shards:06d}.safetensors"
        part = entries[i * step : (i + 1) * step]
        write_shard(folder / file, part, fill)
        index |= {entry.name: file for entry in part}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def write_shard(path: Path, entries: Iterable[Entry], fill: Fill) -> None:
    header, at, entries = {}, 0, list(entries)
    for entry in entries:
        offsets = [at, at + entry.n_bytes]
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": offsets}
        at += entry.n_bytes
    raw = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        for entry in entries:
            data = fill(entry)
            if data is None:
                file.seek(entry.n_bytes, 1)
            else:
                assert len(data) == entry.n_bytes, entry
                file.write(data)
        file.truncate()
