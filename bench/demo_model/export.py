"""Trained weights -> a checkpoint in the layout of the official DeepSeek-V3 release.

    python -m bench.demo_model.export WEIGHTS.pt --tokenizer tokenizer.json --out DIR

Linear layers as FP8 e4m3 with a F32 scale per 128 x 128 block (blocks at the edges are partial),
norms, embeddings, head, router and eh_proj as BF16, the router's bias as F32. The MTP layer carries
copies of embedding and head, as the release does. Configurations are the checked-in demo's.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from .train import CONFIG

BLOCK = 128
FP8_MAX = 448.0  # torch.finfo(torch.float8_e4m3fn).max
N_SHARDS = 3
FP8_LAYERS = (
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_b_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)
COPIED_FILES = ("config.json", "generation_config.json", "tokenizer_config.json")


def to_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, cols] -> e4m3 of that shape, F32 scales [ceil(rows / 128), ceil(cols / 128)]."""
    rows, cols = weight.shape
    padded = F.pad(weight, (0, -cols % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(len(padded) // BLOCK, BLOCK, -1, BLOCK)
    scale = blocks.abs().amax((1, 3)).clamp(min=1e-12) / FP8_MAX
    scaled = (blocks / scale[:, None, :, None]).view(padded.shape)
    return scaled[:rows, :cols].to(torch.float8_e4m3fn), scale


def stored(weights: Mapping[str, Tensor], n_layers: int) -> dict[str, Tensor]:
    """The tensors of the checkpoint, from float32 weights in the model's names."""
    mtp = f"model.layers.{n_layers}."
    copies = {
        mtp + "embed_tokens.weight": weights["model.embed_tokens.weight"],
        mtp + "shared_head.head.weight": weights["lm_head.weight"],
    }
    tensors: dict[str, Tensor] = {}
    for name, weight in {**weights, **copies}.items():
        layer = name.split(".")[-2]
        if name.endswith("e_score_correction_bias"):
            tensors[name] = weight.float()
        elif layer in FP8_LAYERS:
            tensors[name], tensors[name + "_scale_inv"] = to_fp8(weight.float())
        else:
            tensors[name] = weight.to(torch.bfloat16)
    return tensors


def shards(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Names in the release's order, cut into parts of about equal bytes: layers, norm, head."""

    def place(name: str) -> tuple[bool, int, str]:
        is_last = name in ("lm_head.weight", "model.norm.weight")
        layer = int(name.split(".")[2]) if name.startswith("model.layers.") else -1
        return is_last, layer, name

    total = sum(tensor.nbytes for tensor in tensors.values())
    parts: list[list[str]] = [[] for _ in range(N_SHARDS)]
    n_bytes = 0
    for name in sorted(tensors, key=place):
        parts[min(n_bytes * N_SHARDS // total, N_SHARDS - 1)].append(name)
        n_bytes += tensors[name].nbytes
    return parts


def export(weights: Mapping[str, Tensor], tokenizer: Path, out: Path) -> int:
    """Write the checkpoint's folder; returns the number of its tensors."""
    n_layers = json.loads(CONFIG.read_text(encoding="utf-8"))["num_hidden_layers"]
    tensors = stored(weights, n_layers)
    out.mkdir(parents=True, exist_ok=True)
    places: dict[str, str] = {}
    for number, names in enumerate(shards(tensors), start=1):
        file = f"model-{number:05d}-of-{N_SHARDS:06d}.safetensors"
        part = {name: tensors[name].contiguous() for name in names}
        save_file(part, out / file, metadata={"format": "pt"})
        places |= dict.fromkeys(names, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    text = json.dumps(index, indent=1)
    (out / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    for name in COPIED_FILES:
        shutil.copyfile(CONFIG.with_name(name), out / name)
    shutil.copyfile(tokenizer, out / "tokenizer.json")
    return len(tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("weights", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    n_tensors = export(torch.load(args.weights), args.tokenizer, args.out)
    print(f"{n_tensors} tensors in {args.out}")


if __name__ == "__main__":
    main()
