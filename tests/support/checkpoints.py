"""Checkpoints made in a test: the demo changed or widened, or V3's layout at any size."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from gguf_mtp.bench.synthetic import INDEX, V3, Entry, Fill, holes, layout, write, write_shard
from gguf_mtp.demo import CHECKPOINT

__all__ = [
    "INDEX", "V3", "Change", "Entry", "Fill", "changed_demo", "holes", "layout", "read_all",
    "widened", "write", "write_shard",
]  # fmt: skip


def read_all(folder: Path) -> dict[str, tuple[Entry, bytes]]:
    """Every tensor of a small checkpoint."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        raw = path.read_bytes()
        (n,) = struct.unpack("<Q", raw[:8])
        for name, e in json.loads(raw[8 : 8 + n]).items():
            if name != "__metadata__":
                begin, end = e["data_offsets"]
                entry = Entry(name, e["dtype"], tuple(e["shape"]))
                found[name] = (entry, raw[8 + n + begin : 8 + n + end])
    return found


Change = Callable[[dict[str, Any], dict[str, tuple[Entry, bytes]]], object]
"""Changes the demo's configuration and tensors in place."""


def changed_demo(folder: Path, change: Change, fill: Fill | None = None) -> Path:
    """The demo, changed. `fill` holes keeps headers only, which is all that planning reads."""
    config = json.loads((CHECKPOINT / "config.json").read_text())
    tensors = read_all(CHECKPOINT)
    change(config, tensors)
    data = dict(tensors.values())
    return write(folder / "checkpoint", config, list(data), fill or data.__getitem__)


def widened(folder: Path, n_expert: int = 8, n_layer: int = 6) -> Path:
    """The demo with every width a multiple of 256 and qk_nope at 128, as K-quants and MLA have it.

    Each tensor repeats the demo's own bytes, so the values are distributed as trained ones are.
    """
    demo = read_all(CHECKPOINT)
    config = json.loads((CHECKPOINT / "config.json").read_text()) | {
        "q_lora_rank": 256,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "moe_intermediate_size": 256,
        "num_hidden_layers": n_layer,
        "n_routed_experts": n_expert,
        "n_group": n_expert // 2,
        "topk_group": n_expert // 4,
    }
    mtp = f"model.layers.{n_layer}."

    def fill(entry: Entry) -> bytes:
        name = entry.name.replace(mtp, "model.layers.6.")
        parts = name.split(".experts.")
        if len(parts) == 2:
            number, rest = parts[1].split(".", 1)
            return tile(demo[f"{parts[0]}.experts.{int(number) % 8}.{rest}"][1], entry)
        return tile(demo[name][1], entry)

    return write(folder, config, layout(config), fill, n_shards=2)


def tile(raw: bytes, entry: Entry) -> bytes:
    return np.resize(np.frombuffer(raw, np.uint8), entry.n_bytes).tobytes()
