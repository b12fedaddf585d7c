"""GGUF files made in a test: a sound, tiny deepseek2 model whose every part can be bent.

The writer believes whatever it is told, so that counts, lengths and offsets may lie.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64 = range(11)
FORMATS = {U8: "B", U16: "H", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q"}
TYPE_F32 = 0


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def value(item: Any, kind: int | None = None) -> bytes:
    """A metadata value with its type: `kind` when given, else by the Python type."""
    if kind is not None:
        return struct.pack("<I" + FORMATS[kind], kind, item)
    if isinstance(item, (str, bytes)):
        return struct.pack("<I", STRING) + text(item)
    if isinstance(item, list):
        if item and isinstance(item[0], str):
            return struct.pack("<IIQ", ARRAY, STRING, len(item)) + b"".join(map(text, item))
        return struct.pack(f"<IIQ{len(item)}i", ARRAY, I32, len(item), *item)
    kind = {bool: BOOL, float: F32}.get(type(item), U32)
    return value(item, kind)


def header(kv: Mapping[str, bytes], tensors: list[bytes], version: int = 3) -> bytes:
    """`kv` values and `tensors` are encoded already."""
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(kv))
    return out + b"".join(text(key) + raw for key, raw in kv.items()) + b"".join(tensors)


def tensor(name: str, shape: tuple[int, ...], kind: int = TYPE_F32, offset: int = 0) -> bytes:
    extents = struct.pack(f"<{len(shape)}Q", *shape)
    return text(name) + struct.pack("<I", len(shape)) + extents + struct.pack("<IQ", kind, offset)


def _hyperparameters() -> dict[str, Any]:
    return {
        "block_count": 3,
        "nextn_predict_layers": 1,
        "context_length": 256,
        "embedding_length": 32,
        "feed_forward_length": 64,
        "attention.head_count": 2,
        "attention.head_count_kv": 1,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.q_lora_rank": 16,
        "attention.kv_lora_rank": 24,
        "attention.key_length": 32,
        "attention.value_length": 24,
        "attention.key_length_mla": 16,
        "attention.value_length_mla": 12,
        "rope.dimension_count": 8,
        "rope.freq_base": 10000.0,
        "leading_dense_block_count": 1,
        "expert_count": 4,
        "expert_used_count": 2,
        "expert_shared_count": 1,
        "expert_group_count": 2,
        "expert_group_used_count": 1,
        "expert_feed_forward_length": 20,
        "expert_gating_func": 2,
        "expert_weights_scale": 1.5,
        "expert_weights_norm": True,
    }


def _block(index: int, is_mtp: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (32,),
        "attn_q_a.weight": (32, 16),
        "attn_q_a_norm.weight": (16,),
        "attn_q_b.weight": (16, 32),
        "attn_kv_a_mqa.weight": (32, 32),
        "attn_kv_a_norm.weight": (24,),
        "attn_k_b.weight": (8, 24, 2),
        "attn_v_b.weight": (24, 12, 2),
        "attn_output.weight": (24, 32),
        "ffn_norm.weight": (32,),
    }
    if index == 0:
        shapes |= {"ffn_gate.weight": (32, 64), "ffn_up.weight": (32, 64)}
        shapes |= {"ffn_down.weight": (64, 32)}
    else:
        shapes |= {"ffn_gate_inp.weight": (32, 4), "exp_probs_b.bias": (4,)}
        for part in ("gate", "up"):
            shapes[f"ffn_{part}_exps.weight"] = (32, 20, 4)
            shapes[f"ffn_{part}_shexp.weight"] = (32, 20)
        shapes |= {"ffn_down_exps.weight": (20, 32, 4), "ffn_down_shexp.weight": (20, 32)}
    if is_mtp:
        shapes |= {"nextn.eh_proj.weight": (64, 32), "nextn.enorm.weight": (32,)}
        shapes |= {"nextn.hnorm.weight": (32,), "nextn.shared_head_norm.weight": (32,)}
    return {f"blk.{index}.{name}": shape for name, shape in shapes.items()}


def _tensors() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (32, 300)}
    shapes |= {"output_norm.weight": (32,), "output.weight": (32, 300)}
    for index in range(3):
        shapes |= _block(index, is_mtp=index == 2)
    return shapes


@dataclass
class Model:
    """A deepseek2 model of two layers and one MTP block, weights all zero, 300 tokens."""

    hyper: dict[str, Any] = field(default_factory=_hyperparameters)
    extra: dict[str, Any] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=_tensors)
    types: dict[str, int] = field(default_factory=dict)
    tokens: list[str] = field(default_factory=lambda: [*_bytes_as_letters(), *_words(44)])
    arch: str = "deepseek2"

    def write(self, path: Path) -> Path:
        kv: dict[str, Any] = {"general.architecture": self.arch, "general.name": "tiny"}
        kv |= {f"{self.arch}.{name}": item for name, item in self.hyper.items()}
        kv |= {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "deepseek-v3",
            "tokenizer.ggml.tokens": self.tokens,
            "tokenizer.ggml.token_type": [1] * len(self.tokens),
            "tokenizer.ggml.merges": ["a b"],
            "tokenizer.ggml.bos_token_id": 256,
            "tokenizer.ggml.eos_token_id": 257,
        } | self.extra
        entries, offset = [], 0
        for name, shape in self.shapes.items():
            entries.append(tensor(name, shape, self.types.get(name, TYPE_F32), offset))
            n_bytes = self._n_bytes(name, shape)
            offset += -(-n_bytes // 32) * 32
        raw = header({key: value(item) for key, item in kv.items()}, entries)
        path.write_bytes(raw + bytes(-len(raw) % 32) + bytes(offset))
        return path

    def _n_bytes(self, name: str, shape: tuple[int, ...]) -> int:
        n = 1
        for extent in shape:
            n *= extent
        # Of the types tests use: F32, F16, Q8_0, I32, F64.
        block, width = {0: (1, 4), 1: (1, 2), 8: (32, 34), 26: (1, 4), 28: (1, 8)}[
            self.types.get(name, 0)
        ]
        return n // block * width


def bent(path: Path, change: Callable[[Model], object]) -> Path:
    """The sound model with one `change`, written to `path`."""
    model = Model()
    change(model)
    return model.write(path)


def _bytes_as_letters() -> list[str]:
    """The 256 byte tokens of a GPT-2 vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(rest))]


def _words(n: int) -> list[str]:
    return [f"<w{index}>" for index in range(n)]
