"""Bytes that decoding reads: of weights for a token, of the KV cache for a cell.

Decoding one token is bound by memory, so bytes are what its time is made of. Pure arithmetic on a
header's facts; knows no device.
"""

from __future__ import annotations

import re

from gguf_mtp.gguf.arch import deepseek4
from gguf_mtp.gguf.cache_layout import kept
from gguf_mtp.gguf.ggml_types import CACHE_TYPES
from gguf_mtp.gguf.hparams import Hparams
from gguf_mtp.types import ModelFacts


def layer_of(name: str) -> int | None:
    """The layer that a tensor belongs to by its name; None for embedding and output."""
    found = re.match(r"blk\.(\d+)\.", name)
    return int(found[1]) if found else None


def is_routed(name: str) -> bool:
    """Whether a tensor stacks routed experts, of which a token reads only some."""
    return "_exps." in name


def expert_share(facts: ModelFacts, n_rows: float) -> float:
    """The share of a layer's routed experts that `n_rows` rows wake together, if each picks its own
    at random: 1 - (1 - k/E)^m. Neighbouring rows agree more often, so it is an upper bound."""
    if not facts.n_expert:
        return 1.0
    return float(1.0 - (1.0 - facts.n_expert_used / facts.n_expert) ** n_rows)


def weights_per_token(facts: ModelFacts) -> int:
    """Bytes of trunk weights that decoding one token reads.

    Of stacked experts only the used ones count, of the token embedding one row, of an MTP block
    nothing.
    """
    total = 0.0
    for tensor in facts.tensors:
        layer = layer_of(tensor.name)
        if layer is not None and layer >= facts.n_layer:
            continue
        if tensor.name == "token_embd.weight":
            continue
        total += tensor.n_bytes * (expert_share(facts, 1) if is_routed(tensor.name) else 1.0)
    return int(total)


def kv_per_cell(facts: ModelFacts, cache_k: str = "f16", cache_v: str = "f16") -> int | None:
    """Bytes of one cell of the KV cache over all layers, the MTP block's included, in types by
    their names in `CACHE_TYPES`.

    None when a model's layers differ in width. Layers with a state have no cells.
    """
    if facts.architecture == "deepseek4":
        kind = CACHE_TYPES[cache_k]
        hparams = Hparams(facts.kv, facts.architecture, facts.path)
        return deepseek4.bytes_per_cell(hparams, kind.n_bytes / kind.block)
    widths = kv_widths(facts)
    if widths is None:
        return None
    n_layers = kept(facts.kv, facts.architecture, facts.n_layer).count("rows") + facts.n_mtp
    types = (CACHE_TYPES[name] for name in (cache_k, cache_v))
    sizes = [n * kind.n_bytes / kind.block for n, kind in zip(widths, types, strict=True)]
    return int(n_layers * sum(sizes))


def kv_widths(facts: ModelFacts) -> tuple[int, int] | None:
    """Values that one cell of one layer holds as key and as value; the compressed key of MLA serves
    as value too. None when a model's layers differ in width."""
    arch = facts.architecture
    heads = facts.kv.get(f"{arch}.attention.head_count_kv", 1)
    key = facts.kv.get(f"{arch}.attention.key_length")
    value = facts.kv.get(f"{arch}.attention.value_length")
    if isinstance(heads, list) and len({n for n in heads if n}) == 1:
        heads = max(heads)  # layers without any keep no rows
    if f"{arch}.attention.key_length_mla" in facts.kv:
        value = 0
    widths = [n for n in (heads, key, value) if isinstance(n, int)]
    if len(widths) < 3:
        return None
    return widths[0] * widths[1], widths[0] * widths[2]
