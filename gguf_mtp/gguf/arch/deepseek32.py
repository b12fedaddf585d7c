"""What the pinned llama.cpp asserts for `deepseek32` files: DeepSeek-V3.2, V3's layout with
a lightning indexer in the trunk.

From `src/models/deepseek32.cpp` and the caches it makes. Its MTP graph is that of `deepseek2`
without an indexer, and asks for the same block.
"""

from __future__ import annotations

from gguf_mtp.gguf.arch import deepseek2
from gguf_mtp.gguf.header import Header
from gguf_mtp.gguf.hparams import Hparams

__all__ = ["why_not_draft", "why_not_run"]

HADAMARD = 64
"""The smallest rotation of indexer keys that the cache has."""


def why_not_run(header: Header, hparams: Hparams) -> str | None:
    """What would abort the process in a plain run, or None."""
    for key in ("attention.key_length_mla", "attention.value_length_mla", "attention.q_lora_rank"):
        if not hparams.count(key, 0):
            return f"it has no {key}, which llama.cpp's deepseek32 graph needs"
    d_index, n_rot = (
        hparams.count("attention.indexer.key_length"),
        hparams.count("rope.dimension_count"),
    )
    if d_index % HADAMARD or d_index < max(n_rot, HADAMARD):
        return (
            f"its indexer keys have {d_index} values, but llama.cpp needs a multiple of {HADAMARD} "
            f"and at least the {n_rot} that RoPE rotates"
        )
    for key in ("attention.indexer.head_count", "attention.indexer.top_k"):
        if not hparams.count(key, 0):
            return f"its {key} is 0 or missing"
    return deepseek2.why_not_run(header, hparams)


why_not_draft = deepseek2.why_not_draft
