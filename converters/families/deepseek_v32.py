"""DeepSeek-V3.2: DeepSeek-V3 with a lightning indexer in every layer, the MTP block's included.

llama.cpp's `deepseek32` graph lets the indexer choose the keys of each query in the trunk; its MTP
graph attends to all and reads no indexer, but its loader wants the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import ConversionError
from ..family import Extra, Family
from ..mla_config import count, section
from ..tensors import Value


def _extras(config: Mapping[str, Any]) -> Sequence[Extra]:
    n_head, d = count(config, "index_n_heads"), count(config, "index_head_dim")
    n_embd, q_rank = count(config, "hidden_size"), count(config, "q_lora_rank")
    source = "self_attn.indexer."
    return (
        Extra("indexer.k_norm.weight", f"{source}k_norm.weight", (d,)),
        Extra("indexer.k_norm.bias", f"{source}k_norm.bias", (d,)),
        Extra("indexer.proj.weight", f"{source}weights_proj.weight", (n_head, n_embd)),
        Extra("indexer.attn_k.weight", f"{source}wk.weight", (d, n_embd)),
        Extra("indexer.attn_q_b.weight", f"{source}wq_b.weight", (n_head * d, q_rank)),
    )


def _metadata(config: Mapping[str, Any]) -> Mapping[str, Value]:
    mscale = section(config, "rope_scaling").get("mscale", 1)
    if mscale != 1:  # the run time reads mscale_all_dim and takes mscale for 1, but for deepseek2
        raise ConversionError(
            f"config.json: mscale is {mscale!r}, but llama.cpp supports only 1 for deepseek32"
        )
    return {
        "attention.indexer.head_count": count(config, "index_n_heads"),
        "attention.indexer.key_length": count(config, "index_head_dim"),
        "attention.indexer.top_k": count(config, "index_topk"),
    }


FAMILY = Family("deepseek32", extras=_extras, metadata=_metadata)
