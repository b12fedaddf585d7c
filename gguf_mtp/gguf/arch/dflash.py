"""What the pinned llama.cpp asserts of DSpark's stages: a `dflash` file with residual streams.

From `src/models/dflash.cpp`. The stages draft a whole block of tokens in one decode, from what some
of the target's layers read, with the target's embedding and head. Other `dflash` files and `eagle3`
ones are not known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from gguf_mtp.gguf.arch import deepseek4
from gguf_mtp.gguf.header import Header
from gguf_mtp.gguf.hparams import Hparams
from gguf_mtp.types import ModelFacts

__all__ = ["ARCHITECTURE", "BlockShape", "is_dspark", "shape", "why_not_draft", "why_not_run"]

ARCHITECTURE = "dflash"
_MASK = "tokenizer.ggml.mask_token_id"
_HEADS = ("fc.weight", "markov_w1.weight", "markov_w2.weight", "conf_proj.weight")


class BlockShape(NamedTuple):
    """`size` tokens are drafted at once, after as many rows whose first is the last certain token
    and whose others are `mask`; `layer_inputs` are the target's layers whose inputs are read."""

    size: int
    mask: int
    layer_inputs: tuple[int, ...]


def is_dspark(kv: Mapping[str, Any]) -> bool:
    """Whether a header of this architecture is DSpark's, for DeepSeek-V4."""
    return f"{ARCHITECTURE}.hyper_connection.count" in kv


def shape(side: ModelFacts | None) -> BlockShape | None:
    """How a drafter's file drafts blocks; None for another file, or none."""
    if side is None or side.architecture != ARCHITECTURE:
        return None
    size, inputs = (side.kv[f"{ARCHITECTURE}.{key}"] for key in ("block_size", "target_layers"))
    return BlockShape(size, side.kv[_MASK], tuple(inputs))


def why_not_run(header: Header, hparams: Hparams) -> str | None:
    """What would abort the process, or None."""
    n_stage, n_head = hparams.count("block_count"), hparams.count("attention.head_count", 0)
    streams = hparams.count("hyper_connection.count")
    n_group = hparams.count("attention.output_group_count", 0)
    names = {tensor.name for tensor in header.tensors}
    missing = next((name for name in _HEADS if name not in names), None)
    size, inputs = hparams.get("block_size"), hparams.get("target_layers")
    mask = header.kv.get(_MASK)
    for is_wrong, why in (
        (missing, f"{missing} is missing"),
        (
            streams != deepseek4.STREAMS,
            f"it has {streams} residual streams, but llama.cpp runs {deepseek4.STREAMS}",
        ),
        (
            not n_group or n_head % n_group != 0,
            f"its {n_head} heads do not divide into {n_group} groups",
        ),
        (not hparams.count("attention.sliding_window", 0), "its sliding window has no rows"),
        (
            hparams.count("expert_gating_func", 0) != deepseek4.SQRT_SOFTPLUS,
            "its experts' gating function is not sqrtsoftplus",
        ),
        (
            any(hparams.by_layer("attention.compress_ratios", n_stage)),
            "its stages have compressed keys, which llama.cpp does not draft with",
        ),
        (
            type(size) is not int or not 0 < size <= 256,
            f"its block_size is {size!r}, but must be a number of tokens, at most 256",
        ),
        (not _are_layers(inputs), f"its target_layers are {inputs!r:.60}, but must name layers"),
        (
            type(mask) is not int or not 0 <= mask < hparams.n_vocab,
            f"its mask token is {mask!r}, which is not in its vocabulary",
        ),
    ):
        if is_wrong:
            return why
    return None


def _are_layers(inputs: Any) -> bool:
    return (
        isinstance(inputs, list)
        and len(inputs) > 0
        and all(type(i) is int and i >= 0 for i in inputs)
    )


def why_not_draft(_header: Header, _hparams: Hparams) -> str | None:
    """Nothing: what `why_not_run` lets pass drafts."""
    return None


def cell_bytes(side: ModelFacts, value: float) -> int:
    """Bytes that the stages keep of a token; `value` is the size of one value of the cache."""
    h = Hparams(side.kv, side.architecture, side.path)
    return int(h.count("block_count") * h.count("attention.key_length") * value)
