"""What the pinned llama.cpp asserts for `deepseek2` files (DeepSeek-V2, V3, R1, GLM-4.7-Flash).

From `src/models/deepseek2.cpp` (loader, `graph`, `graph_mtp`) and the graph parts they call. A
missing or misshapen tensor of the trunk is not looked for: there the loader itself fails, and names
it. In the MTP block it is, because a file with half a block is refused even for a plain run.
"""

from __future__ import annotations

from typing import NamedTuple

from gguf_mtp.gguf.header import Header
from gguf_mtp.gguf.hparams import Hparams

__all__ = ["why_not_draft", "why_not_run"]


class _HeadSizes(NamedTuple):
    n_embd: int
    n_head: int
    head_k: int  # a head's key length: the MLA one where the file is MLA
    head_v: int
    n_rot: int
    is_mla: bool
    q_lora: int
    kv_lora: int
    n_expert: int
    n_ff_exp: int
    n_shared: int


def _sizes(hparams: Hparams) -> _HeadSizes:
    n_embd, n_head = hparams.count("embedding_length"), hparams.count("attention.head_count", 0)
    split = n_embd // n_head if n_head else 0
    key_length = hparams.count("attention.key_length", split)
    mla = (
        hparams.count("attention.key_length_mla", 0),
        hparams.count("attention.value_length_mla", 0),
    )
    heads = mla if all(mla) else (key_length, hparams.count("attention.value_length", split))
    return _HeadSizes(
        n_embd=n_embd,
        n_head=n_head,
        head_k=heads[0],
        head_v=heads[1],
        n_rot=hparams.count("rope.dimension_count", key_length),
        is_mla=all(mla),
        q_lora=0 if _is_lite(hparams) else hparams.count("attention.q_lora_rank", 0),
        kv_lora=hparams.count("attention.kv_lora_rank"),
        n_expert=hparams.count("expert_count", 0),
        n_ff_exp=hparams.largest("expert_feed_forward_length"),
        n_shared=hparams.count("expert_shared_count"),
    )


def _n_layer(hparams: Hparams) -> int:
    return hparams.count("block_count") - hparams.count("nextn_predict_layers", 0)


def _is_lite(hparams: Hparams) -> bool:
    """The loader takes these depths for a lite model and ignores q_lora."""
    n_layer = _n_layer(hparams)
    if hparams.arch != "deepseek2":
        return False
    return n_layer in (26, 27) or (n_layer == 48 and hparams.n_vocab == 128256)


def why_not_run(header: Header, hparams: Hparams) -> str | None:
    """What would abort the process in a plain run, or None."""
    s = _sizes(hparams)
    if s.n_head == 0:
        return "it has no attention heads"
    if s.n_rot % 2 or not 0 < s.n_rot < s.head_k:
        return f"RoPE cannot rotate {s.n_rot} of the {s.head_k} dimensions of a head"
    n_head_kv = hparams.count("attention.head_count_kv", s.n_head)
    key_length = hparams.count("attention.key_length", s.n_embd // s.n_head)
    cached, needed = (key_length, n_head_kv), (s.kv_lora + s.n_rot, 1)
    if not s.is_mla:
        needed = (s.head_k, s.n_head)
    if cached != needed:
        return (
            f"its KV cache holds {cached[1]} keys of {cached[0]} values per token "
            f"(head_count_kv, key_length), but its attention writes {needed[1]} of {needed[0]}"
        )
    if hparams.get("attention.temperature_scale", 0.0) and not hparams.count(
        "attention.temperature_length", 0
    ):
        return "it scales the attention temperature, but has no attention.temperature_length"
    n_groups = hparams.count("expert_group_count", 0)
    if n_groups > 1 and s.n_expert // n_groups < 2:
        return (
            f"its {n_groups} expert groups hold one expert each, but routing sums the two best "
            "experts of a group"
        )
    return _half_a_block(header, hparams)


def why_not_draft(header: Header, hparams: Hparams) -> str | None:
    """What keeps the file's MTP block from drafting (`graph_mtp` would abort), or None."""
    s, n_layer = _sizes(hparams), _n_layer(hparams)
    n_mtp = hparams.count("nextn_predict_layers")
    if n_mtp != 1:
        return f"the file has {n_mtp} MTP blocks, but llama.cpp drafts with exactly one"
    names, block = {tensor.name for tensor in header.tensors}, f"blk.{n_layer}"
    if f"{block}.nextn.eh_proj.weight" not in names:
        return f"the header declares an MTP block, but {block}.nextn.eh_proj.weight is missing"
    if not s.is_mla:
        unsplit = f" ({block}.attn_kv_b.weight)" if f"{block}.attn_kv_b.weight" in names else ""
        return f"the MLA key and value matrices are not split{unsplit}; convert the model again"
    if s.q_lora == 0:
        lite = (
            f", but llama.cpp treats a model of {n_layer} layers as a lite model without one"
            if _is_lite(hparams)
            else ""
        )
        return f"the MTP block needs a low-rank query (q_lora_rank){lite}"
    if hparams.get("attention.temperature_scale", 0.0):
        return "the MTP block does not support attention temperature scaling"
    if hparams.count("leading_dense_block_count", 0) > n_layer:
        return f"the MTP block {block} must have experts, but is a dense layer"
    return None


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def _half_a_block(header: Header, hparams: Hparams) -> str | None:
    """The tensor that a whole MTP block would have otherwise, or None."""
    block = f"blk.{_n_layer(hparams)}"
    shapes = {tensor.name: _trimmed(tensor.shape) for tensor in header.tensors}
    if f"{block}.nextn.eh_proj.weight" not in shapes or why_not_draft(header, hparams):
        return None  # no block, or one that a plain run skips
    s, n_vocab = _sizes(hparams), hparams.n_vocab
    required = _block_shapes(s)
    if f"{block}.ffn_gate_up_exps.weight" in shapes:
        del required["ffn_gate_exps.weight"], required["ffn_up_exps.weight"]
        required["ffn_gate_up_exps.weight"] = (s.n_embd, 2 * s.n_ff_exp, s.n_expert)
    optional = {
        "exp_probs_b.bias": (s.n_expert,),
        "nextn.shared_head_norm.weight": (s.n_embd,),
        "nextn.embed_tokens.weight": (s.n_embd, n_vocab),
        "nextn.shared_head_head.weight": (s.n_embd, n_vocab),
    }
    for name, shape in (required | optional).items():
        found = shapes.get(f"{block}.{name}")
        if found is None and name in required:
            return f"{block}.{name} is missing"
        if found is not None and found != _trimmed(shape):
            return f"{block}.{name} is {_times(found)}, but must be {_times(shape)}"
    return None


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _block_shapes(s: _HeadSizes) -> dict[str, tuple[int, ...]]:
    """The tensors `graph_mtp` needs in its block, in ggml order (innermost first)."""
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (s.n_embd,),
        "attn_q_a": (s.n_embd, s.q_lora),
        "attn_q_a_norm": (s.q_lora,),
        "attn_q_b": (s.q_lora, s.n_head * s.head_k),
        "attn_kv_a_mqa": (s.n_embd, s.kv_lora + s.n_rot),
        "attn_kv_a_norm": (s.kv_lora,),
        "attn_k_b": (s.head_k - s.n_rot, s.kv_lora, s.n_head),
        "attn_v_b": (s.kv_lora, s.head_v, s.n_head),
        "attn_output": (s.n_head * s.head_v, s.n_embd),
        "ffn_norm": (s.n_embd,),
        "ffn_gate_inp": (s.n_embd, s.n_expert),
        "ffn_gate_exps": (s.n_embd, s.n_ff_exp, s.n_expert),
        "ffn_up_exps": (s.n_embd, s.n_ff_exp, s.n_expert),
        "ffn_down_exps": (s.n_ff_exp, s.n_embd, s.n_expert),
        "ffn_gate_shexp": (s.n_embd, s.n_ff_exp * s.n_shared),
        "ffn_up_shexp": (s.n_embd, s.n_ff_exp * s.n_shared),
        "ffn_down_shexp": (s.n_ff_exp * s.n_shared, s.n_embd),
        "nextn.eh_proj": (2 * s.n_embd, s.n_embd),
        "nextn.enorm": (s.n_embd,),
        "nextn.hnorm": (s.n_embd,),
    }
    return {f"{name}.weight": shape for name, shape in shapes.items()}
