"""What the pinned llama.cpp asserts for `deepseek4` files: DeepSeek-V4, and what its cache takes.

From `src/models/deepseek4.cpp` and `src/llama-kv-cache-dsv4.cpp`. Every layer attends to a window
of rows, and most to compressed keys too, one for 4 or 128 tokens; what the next compressed key is
made of is a state, of which as many earlier ones are kept as a draft may have tokens. The MTP block
reads and writes four residual streams, and has an `output_hc_*` of its own under the trunk's names:
so it is a file of its own, never a part of the trunk's.
"""

from __future__ import annotations

from typing import NamedTuple

from gguf_mtp.gguf.header import Header
from gguf_mtp.gguf.hparams import Hparams

__all__ = ["bytes_per_cell", "cache_bytes", "row_bytes", "why_not_draft", "why_not_run"]

CSA, HCA = 4, 128
"""Tokens to one compressed key: with a lightning indexer, and without."""
STREAMS = 4
SQRT_SOFTPLUS = 4  # llama_expert_gating_func_type
_CELLS = 256
F32 = 4


class _Sizes(NamedTuple):
    n_layer: int
    ratios: list[int]
    head: int
    d_index: int
    window: int


def _sizes(hparams: Hparams) -> _Sizes:
    n_layer = hparams.count("block_count") - hparams.count("nextn_predict_layers", 0)
    return _Sizes(
        n_layer=n_layer,
        ratios=hparams.by_layer("attention.compress_ratios", n_layer),
        head=hparams.count("attention.key_length"),
        d_index=hparams.count("attention.indexer.key_length"),
        window=hparams.count("attention.sliding_window"),
    )


def why_not_run(header: Header, hparams: Hparams) -> str | None:
    """What would abort the process in a plain run, or None."""
    s, n_head = _sizes(hparams), hparams.count("attention.head_count", 0)
    n_rot, n_group = (
        hparams.count("rope.dimension_count"),
        hparams.count("attention.output_group_count"),
    )
    streams = hparams.count("hyper_connection.count")
    value = hparams.count("attention.value_length", s.head)
    ratios = {*s.ratios} - {0, CSA, HCA}
    for is_wrong, why in (
        (ratios, f"its compress_ratios hold {sorted(ratios)}, but must be 0, {CSA} or {HCA}"),
        (streams != STREAMS, f"it has {streams} residual streams, but llama.cpp runs {STREAMS}"),
        (s.head != value, f"its heads have {s.head} key and {value} value dimensions"),
        (hparams.count("attention.head_count_kv", 1) != 1, "it has more than one key per token"),
        (
            not n_group or n_head % n_group != 0,
            f"its {n_head} heads do not divide into {n_group} groups",
        ),
        (
            not 0 < n_rot <= min(s.head, s.d_index),
            f"RoPE cannot rotate {n_rot} of the {min(s.head, s.d_index)} dimensions of a head",
        ),
        (not s.window, "its sliding window has no rows"),
        (
            hparams.count("expert_gating_func", 0) != SQRT_SOFTPLUS,
            "its experts' gating function is not sqrtsoftplus",
        ),
    ):
        if is_wrong:
            return why
    return _wrong_route(header, hparams)


def _wrong_route(header: Header, hparams: Hparams) -> str | None:
    """Hash layers look experts up by token."""
    for tensor in header.tensors:
        if "tid2eid" in tensor.name and tensor.type != "I32":
            return f"{tensor.name} is {tensor.type}, but llama.cpp looks experts up in I32"
    n_hash, n_layer = hparams.count("hash_layer_count", 0), _sizes(hparams).n_layer
    if n_hash > n_layer:
        return f"its header declares {n_hash} hash layers, but only {n_layer} layers"
    return None


def why_not_draft(header: Header, hparams: Hparams) -> str | None:
    """What keeps the file's MTP block from drafting, or None. Shapes are the loader's to check."""
    n_mtp, n_layer = hparams.count("nextn_predict_layers"), _sizes(hparams).n_layer
    names = {tensor.name for tensor in header.tensors}
    if n_mtp != 1:
        return f"the file has {n_mtp} MTP blocks, but llama.cpp drafts with exactly one"
    if "blk.0.attn_norm.weight" in names:
        return (
            "its MTP block lies in the trunk's file, where llama.cpp gives it the trunk's "
            "output_hc_* instead of its own; convert it to a side file (mtp-*.gguf)"
        )
    for part in ("eh_proj", "enorm", "hnorm", "shared_head_norm"):
        name = f"blk.{n_layer}.nextn.{part}.weight"
        if name not in names:
            return f"the header declares an MTP block, but {name} is missing"
    if hparams.by_layer("attention.compress_ratios", n_layer + 1)[-1]:
        return "its MTP block has compressed keys, which llama.cpp's MTP graph does not read"
    if hparams.count("hash_layer_count", 0) > n_layer:
        return "its MTP block is a hash layer, which llama.cpp's MTP graph does not run"
    return None


def cache_bytes(
    hparams: Hparams, n_cells: int, n_seq: int, n_batch: int, n_states: int, value: float
) -> tuple[list[int], int]:
    """Bytes that each trunk layer keeps of `n_seq` sequences of `n_cells` tokens each, and those of
    the MTP block: its window alone. `n_states` are kept of each sequence, `value` is the size of
    one value of the cache."""
    s = _sizes(hparams)
    window = min(_padded(s.window + n_batch), _padded(n_cells))
    raw = window * s.head * value
    layers = []
    for ratio in s.ratios:
        n_bytes = raw
        if ratio:
            keys = _padded(-(-n_cells // ratio))
            indexed = s.head + (s.d_index if ratio == CSA else 0)
            rows, width = (2 * CSA, 2 * indexed) if ratio == CSA else (HCA, s.head)
            n_bytes += keys * indexed * value + 2 * rows * width * F32 * n_states
        layers.append(int(n_seq * n_bytes))
    return layers, int(n_seq * raw)


def row_bytes(hparams: Hparams, n_cells: int) -> int:
    """What a row of a batch takes beside other architectures' buffers: its residual streams, and
    the indexer's score for every compressed key."""
    scores = hparams.count("attention.indexer.head_count") * _padded(-(-n_cells // CSA))
    return stream_bytes(hparams) + F32 * scores


def stream_bytes(hparams: Hparams) -> int:
    """What the residual streams of a row take of a decode's buffers."""
    return F32 * 4 * STREAMS * hparams.count("embedding_length")


def bytes_per_cell(hparams: Hparams, value: float) -> int:
    """Bytes that a token of a long sequence adds to the cache."""
    s = _sizes(hparams)
    per_ratio = {0: 0.0, CSA: (s.head + s.d_index) / CSA, HCA: s.head / HCA}
    return int(value * sum(per_ratio[ratio] for ratio in s.ratios))


def _padded(n: int) -> int:
    return -(-n // _CELLS) * _CELLS
