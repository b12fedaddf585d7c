"""Bytes a token reads, against sums done by hand."""

from __future__ import annotations

import dataclasses

from gguf_mtp.gguf.bytes_per_token import kv_per_cell, weights_per_token
from gguf_mtp.types import ModelFacts, TensorInfo


def tensor(name: str, n_bytes: int) -> TensorInfo:
    return TensorInfo(name, (1,), "F32", n_bytes, 0, "x.gguf")


FACTS = ModelFacts(
    path="x.gguf",
    architecture="deepseek2",
    name="",
    n_layer=2,
    n_mtp=1,
    n_embd=8,
    n_vocab=10,
    context_length=100,
    n_expert=8,
    n_expert_used=2,
    can_draft=True,
    reason="",
    tensors=(
        tensor("token_embd.weight", 10_000),
        tensor("output.weight", 500),
        tensor("blk.0.attn_q_a.weight", 30),
        tensor("blk.1.ffn_up_exps.weight", 800),
        tensor("blk.1.ffn_up_shexp.weight", 7),
        tensor("blk.2.nextn.eh_proj.weight", 9_000),
    ),
    kv={
        "deepseek2.attention.head_count_kv": 1,
        "deepseek2.attention.key_length": 576,
        "deepseek2.attention.value_length": 512,
        "deepseek2.attention.key_length_mla": 192,
    },
)


def test_a_token_reads_the_used_experts_and_no_embedding_and_no_mtp_block() -> None:
    assert weights_per_token(FACTS) == 500 + 30 + 800 * 2 // 8 + 7


def test_mla_caches_keys_only() -> None:
    assert kv_per_cell(FACTS) == 3 * 576 * 2
    assert kv_per_cell(FACTS, "f32", "f32") == 3 * 576 * 4


def test_other_attention_caches_keys_and_values() -> None:
    kv = dict(FACTS.kv, **{"deepseek2.attention.head_count_kv": 4})
    del kv["deepseek2.attention.key_length_mla"]
    assert kv_per_cell(dataclasses.replace(FACTS, kv=kv)) == 3 * 4 * (576 + 512) * 2


def test_a_width_per_layer_is_not_guessed_at() -> None:
    kv = dict(FACTS.kv, **{"deepseek2.attention.head_count_kv": None})
    assert kv_per_cell(dataclasses.replace(FACTS, kv=kv)) is None
