"""Trained weights -> checkpoints in the layout of the official DeepSeek-V4 releases.

    python -m bench.demo_model.v4_export WEIGHTS.pt --tokenizer tokenizer.json --out DIR

Writes DIR/V4 with the MTP block, as the first release has it, and DIR/V4-0731 with DSpark. Linear
layers are FP8 e4m3 with an E8M0 scale per 128 x 128 block, experts FP4 with one for 32 values; the
rest is BF16 and F32, as in the releases.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from .export import BLOCK, FP8_MAX
from .train import CONFIG as DEMO_CONFIG
from .v4_model import CONFIG, N_STAGES

FP4_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FP4_BLOCK = 32
ATTENTION = {
    "q_a_proj": "wq_a", "q_b_proj": "wq_b", "kv_proj": "wkv", "o_a_proj": "wo_a",
    "o_b_proj": "wo_b", "q_a_norm": "q_norm", "kv_norm": "kv_norm",
}  # fmt: skip
IN_BF16 = ("wkv", "wgate", "weights_proj", "gate")
"""Linear layers that the releases leave in BF16: compressors, the indexer's weights, the router."""
SHARED = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
Named = Iterator[tuple[str, Tensor]]


def powers_of_two(largest: Tensor, most: float) -> Tensor:
    """The exponents that bring values of these magnitudes under `most`, as E8M0 has them."""
    return torch.ceil(torch.log2(largest.clamp(min=1e-30) / most)).clamp(-127, 127)


def e8m0(exponents: Tensor) -> Tensor:
    return (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


def fp8(name: str, weight: Tensor) -> Named:
    """[rows, cols] as e4m3 and its scales [ceil(rows / 128), ceil(cols / 128)]."""
    rows, cols = weight.shape
    padded = F.pad(weight, (0, -cols % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(len(padded) // BLOCK, BLOCK, -1, BLOCK)
    exponents = powers_of_two(blocks.abs().amax((1, 3)), FP8_MAX)
    scaled = (blocks / torch.exp2(exponents)[:, None, :, None]).view(padded.shape)
    yield f"{name}.weight", scaled[:rows, :cols].to(torch.float8_e4m3fn)
    yield f"{name}.scale", e8m0(exponents)


def fp4(name: str, weight: Tensor) -> Named:
    """[rows, cols] as pairs of codes, the first in the low half, and scales [rows, cols / 32]."""
    blocks = weight.view(len(weight), -1, FP4_BLOCK)
    exponents = powers_of_two(blocks.abs().amax(-1), float(FP4_VALUES[-1]))
    scaled = blocks / torch.exp2(exponents)[..., None]
    nearest = (scaled.abs()[..., None] - FP4_VALUES).abs().argmin(-1)
    codes = (nearest + 8 * (scaled < 0)).view(weight.shape).to(torch.uint8)
    yield f"{name}.weight", (codes[:, 0::2] | codes[:, 1::2] << 4).view(torch.int8)
    yield f"{name}.scale", e8m0(exponents)


def bf16(name: str, weight: Tensor) -> Named:
    yield f"{name}.weight", weight.to(torch.bfloat16)


def layer(to: str, w: Mapping[str, Tensor]) -> Named:
    """One decoder layer; `w` has its tensors by transformers' names."""
    yield from bf16(f"{to}attn_norm", w["input_layernorm.weight"])
    yield from bf16(f"{to}ffn_norm", w["post_attention_layernorm.weight"])
    yield f"{to}attn.attn_sink", w["self_attn.sinks"]
    for name, official in ATTENTION.items():
        write = bf16 if name.endswith("norm") else fp8
        yield from write(f"{to}attn.{official}", w[f"self_attn.{name}.weight"])
    yield from compressor(f"{to}attn.", "self_attn.compressor.", w)
    index = "self_attn.compressor.indexer."
    if f"{index}q_b_proj.weight" in w:
        yield from compressor(f"{to}attn.indexer.", index, w)
        yield from fp8(f"{to}attn.indexer.wq_b", w[f"{index}q_b_proj.weight"])
        proj = w[f"{index}scorer.weights_proj.weight"]
        yield from bf16(f"{to}attn.indexer.weights_proj", proj)
    for name in ("attn", "ffn"):
        yield from streams(f"{to}hc_{name}", f"{name}_hc.", w)
    yield from bf16(f"{to}ffn.gate", w["mlp.gate.weight"])
    if "mlp.gate.tid2eid" in w:
        yield f"{to}ffn.gate.tid2eid", w["mlp.gate.tid2eid"]
    else:
        yield f"{to}ffn.gate.bias", w["mlp.gate.e_score_correction_bias"]
    for e, both in enumerate(w["mlp.experts.gate_up_proj"]):
        gate, up = both.chunk(2)
        for name, part in (("w1", gate), ("w3", up), ("w2", w["mlp.experts.down_proj"][e])):
            yield from fp4(f"{to}ffn.experts.{e}.{name}", part)
    for name, official in SHARED.items():
        yield from fp8(f"{to}ffn.shared_experts.{official}", w[f"mlp.shared_experts.{name}.weight"])


def compressor(to: str, of: str, w: Mapping[str, Tensor]) -> Named:
    if f"{of}position_bias" not in w:
        return
    yield f"{to}compressor.ape", w[f"{of}position_bias"]
    for name, official in (("kv_proj", "wkv"), ("gate_proj", "wgate"), ("kv_norm", "norm")):
        yield from bf16(f"{to}compressor.{official}", w[f"{of}{name}.weight"])


def streams(to: str, of: str, w: Mapping[str, Tensor]) -> Named:
    for part in ("fn", "base", "scale"):
        yield f"{to}_{part}", w[f"{of}{part}"]


def under(prefix: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}


def trunk(weights: Mapping[str, Tensor], n_layer: int) -> Named:
    yield from bf16("embed", weights["trunk.model.embed_tokens.weight"])
    yield from bf16("norm", weights["trunk.model.norm.weight"])
    yield from bf16("head", weights["trunk.lm_head.weight"])
    yield from streams("hc_head", "trunk.model.hc_head.hc_", weights)
    for i in range(n_layer):
        yield from layer(f"layers.{i}.", under(f"trunk.model.layers.{i}.", weights))


def mtp_block(weights: Mapping[str, Tensor]) -> Named:
    w = under("mtp.", weights)
    yield from layer("mtp.0.", under("layer.", w))
    yield from streams("mtp.0.hc_head", "hc_head.hc_", w)
    for name in ("enorm", "hnorm", "norm"):
        yield from bf16(f"mtp.0.{name}", w[f"{name}.weight"])
    for name in ("e_proj", "h_proj"):
        yield from fp8(f"mtp.0.{name}", w[f"{name}.weight"])


def dspark(weights: Mapping[str, Tensor]) -> Named:
    w, last = under("dspark.", weights), f"mtp.{N_STAGES - 1}."
    for i in range(N_STAGES):
        yield from layer(f"mtp.{i}.", under(f"layers.{i}.", w))
    yield from fp8("mtp.0.main_proj", w["main_proj.weight"])
    yield from bf16("mtp.0.main_norm", w["main_norm.weight"])
    yield from bf16(f"{last}norm", w["norm.weight"])
    yield from streams(f"{last}hc_head", "hc_head.hc_", w)
    for i in (1, 2):
        yield from bf16(f"{last}markov_head.markov_w{i}", w[f"markov_w{i}.weight"])
    yield from bf16(f"{last}confidence_head.proj", w["confidence.weight"])


def save(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], tokenizer: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    drafter = {name for name in tensors if name.startswith("mtp.")}
    places: dict[str, str] = {}
    for i, names in enumerate((tensors.keys() - drafter, drafter), start=1):
        file = f"model-{i:05d}-of-00002.safetensors"
        part = {name: tensors[name].contiguous() for name in sorted(names)}
        save_file(part, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(part, file)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    for name in ("generation_config.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO_CONFIG.with_name(name), folder / name)
    shutil.copyfile(tokenizer, folder / "tokenizer.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("weights", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    weights = torch.load(args.weights)
    config = json.loads(CONFIG.read_text(encoding="utf-8"))
    common = dict(trunk(weights, config["num_hidden_layers"]))
    plain = {k: v for k, v in config.items() if not k.startswith("dspark")}
    plain["compress_ratios"] = config["compress_ratios"][: config["num_hidden_layers"] + 1]
    save(args.out / "V4", plain, common | dict(mtp_block(weights)), args.tokenizer)
    save(args.out / "V4-0731", config, common | dict(dspark(weights)), args.tokenizer)


if __name__ == "__main__":
    main()
