"""What each layer of a model keeps of the tokens before: a row for every one, or one state.

Read from a header, as llama.cpp's loaders read it (`src/models/qwen35.cpp`, `nemotron-h.cpp`,
`bailingmoe3.cpp`, `lfm2.cpp`; `llama_hparams::n_embd_r` and `n_embd_s`; `llm_arch_is_hybrid` and
`llm_arch_supports_rs_rollback`). Knows no context and no memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from gguf_mtp.gguf.hparams import Hparams

__all__ = [
    "GOES_BACK",
    "WITH_BLOCK",
    "Kept",
    "is_recurrent",
    "kept",
    "state_bytes",
    "why_no_draft",
]

Kept = Literal["rows", "state", "nothing"]
_ROWS: Kept = "rows"
_STATE: Kept = "state"
_NOTHING: Kept = "nothing"
F32 = 4

WITH_BLOCK = ("qwen35", "qwen35moe", "nemotron_h_moe", "bailingmoe3")
"""Those of the next that may have an MTP block."""
GOES_BACK = (*WITH_BLOCK, "deepseek4", "lfm2", "nemotron_h")
"""Recurrent architectures whose last states llama.cpp keeps when asked to, and that were tested."""
_QWEN = ("qwen35", "qwen35moe", "qwen3next")
_RECURRENT = frozenset(
    [
        *_QWEN, "arwkv7", "bailingmoe3", "deepseek4", "falcon-h1", "glm5-next", "granitehybrid",
        "jamba", "kimi-k3", "kimi-linear", "lfm2", "lfm2moe", "mamba", "mamba2", "minimax-01",
        "nemotron_h", "nemotron_h_moe", "plamo2", "qwen4exp", "rwkv6", "rwkv6qwen2", "rwkv7",
    ]
)  # fmt: skip
_OWN_WINDOW = ("deepseek4",)
"""Those whose window goes back with their states."""
_NOT_TESTED = ("glm5-next", "kimi-k3", "lfm2moe", "qwen4exp")
"""Others of which llama.cpp keeps states."""


def is_recurrent(architecture: str) -> bool:
    """Whether some layers keep a state, or all do."""
    return architecture in _RECURRENT


def why_no_draft(kv: Mapping[str, Any], architecture: str) -> str | None:
    """Why nothing can be drafted for such a model, by whatever drafter; None if it can."""
    if not is_recurrent(architecture):
        return None
    if architecture in GOES_BACK:
        has_window = kv.get(f"{architecture}.attention.sliding_window")
        if architecture in _OWN_WINDOW or not has_window:
            return None
        return "the model has recurrent layers and sliding-window attention"
    if architecture in _NOT_TESTED:
        return "the model has recurrent layers, and rewinding their state has not been tested"
    return "the model has recurrent layers, and their cache cannot drop rejected draft tokens"


def kept(kv: Mapping[str, Any], architecture: str, n_layer: int) -> tuple[Kept, ...]:
    """Of each trunk layer. Rows for all, which is the most, where the header is not understood."""
    h = Hparams(kv, architecture, "the file")
    if architecture in _QWEN:
        marks = h.get("attention.recurrent_layers")
        if isinstance(marks, list) and len(marks) >= n_layer:
            are_states = [bool(mark) for mark in marks[:n_layer]]
        else:
            every = h.count("full_attention_interval", 4) or n_layer + 1
            are_states = [(i + 1) % every != 0 for i in range(n_layer)]
        return tuple(_STATE if is_state else _ROWS for is_state in are_states)
    if architecture == "deepseek4":  # rows in all; `arch.deepseek4` knows how many
        return (_ROWS,) * n_layer
    if architecture in GOES_BACK:
        heads, widths = h.by_layer("attention.head_count_kv", n_layer), [0] * n_layer
        if architecture.startswith("nemotron"):  # elsewhere each layer has a dense part too
            widths = h.by_layer("feed_forward_length", n_layer)
        return tuple(
            _NOTHING if n_ff else _ROWS if n_head else _STATE
            for n_head, n_ff in zip(heads, widths, strict=True)
        )
    return (_ROWS,) * n_layer


def state_bytes(kv: Mapping[str, Any], architecture: str) -> int:
    """Of one recurrent layer and one sequence: the convolution's last inputs and the state."""
    h = Hparams(kv, architecture, "the file")
    head = h.count("kda.head_dim", 0)
    if head:  # of queries, keys and values
        n_head, n_conv = h.largest("attention.head_count"), h.count("ssm.conv_kernel", 4) - 1
        return F32 * n_head * head * (3 * n_conv + head)
    if architecture == "lfm2":  # a convolution alone
        return F32 * h.count("embedding_length") * (h.count("shortconv.l_cache", 1) - 1)
    inner, size = h.count("ssm.inner_size", 0), h.count("ssm.state_size", 0)
    n_conv = max(h.count("ssm.conv_kernel", 0) - 1, 0)
    width = inner + 2 * h.count("ssm.group_count", 0) * size
    return F32 * (n_conv * width + size * inner)
