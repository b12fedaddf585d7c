"""Bytes that decoding reads: of weights for a token, of the KV cache for a cell.

Decoding one token is bound by memory, so bytes are what its time is made of. Pure arithmetic on a
header's facts; knows no device.
"""

from __future__ import annotations

import re

from gguf_mtp.types import ModelFacts


def weights_per_token(facts: ModelFacts) -> int:
    """Bytes of trunk weights that decoding one token reads.

    Of stacked experts only the used ones count, of the token embedding one row, of an MTP block
    nothing.
    """
    total = 0.0
    for tensor in facts.tensors:
        layer = re.match(r"blk\.(\d+)\.", tensor.name)
        if layer and int(layer[1]) >= facts.n_layer:
            continue
        if tensor.name == "token_embd.weight":
            continue
        used = facts.n_expert_used / facts.n_expert if "_exps." in tensor.name else 1.0
        total += tensor.n_bytes * used
    return int(total)


def kv_per_cell(facts: ModelFacts, bytes_per_value: int = 2) -> int | None:
    """Bytes of one cell of the KV cache over all layers, the MTP block's included.

    The compressed key of MLA serves as value too. None when a model's layers differ in width.
    """
    arch = facts.architecture
    heads = facts.kv.get(f"{arch}.attention.head_count_kv", 1)
    key = facts.kv.get(f"{arch}.attention.key_length")
    value = facts.kv.get(f"{arch}.attention.value_length")
    if f"{arch}.attention.key_length_mla" in facts.kv:
        value = 0
    widths = [n for n in (heads, key, value) if isinstance(n, int)]
    if len(widths) < 3:
        return None
    return (facts.n_layer + facts.n_mtp) * widths[0] * (widths[1] + widths[2]) * bytes_per_value
