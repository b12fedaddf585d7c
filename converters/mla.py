"""DeepSeek-V3's names, hyperparameters and reshapes, its MTP block included.

DeepSeek-V3, R1, V3.1 and Kimi-K2 share it, and other families say what they do otherwise: MLA
attention, grouped sigmoid routing, YaRN, and after the trunk one block that predicts the token
after next. Tensor names and shapes are those of llama.cpp's `deepseek2` graph; the MLA split was
read in its loader. Where that loader would fall back in silence (no gating function, no selection
bias, no head), this refuses.

It knows nothing of types, quantisation or files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import ConversionError
from .family import Extra, Family
from .ledger import Ledger
from .mla_config import Hyperparameters
from .mla_metadata import metadata
from .tensors import Adapted, Books, OutputTensor, Source, SourceRows, Weight

_COMPARED_AT_ONCE = 1 << 22
_EXPERT = "mlp.experts.{}.{}_proj.weight"


Mtp = Literal["keep", "drop", "only"]
"""What becomes of the MTP block: kept behind the trunk, dropped, or alone in a side file."""

_ROOT = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")


@dataclass(frozen=True, slots=True)
class Choices:
    """`draft_head` True gives the MTP block its own head."""

    mtp: Mtp = "keep"
    draft_head: bool = False


def needs(config: Mapping[str, Any], mtp: Mtp, name: str) -> bool:
    """Whether the tensor `name` is read at all, so that shards without any can stay away."""
    if mtp != "only" or name in _ROOT:
        return True
    match, n_layer = re.match(r"model\.layers\.(\d+)\.", name), config.get("num_hidden_layers")
    return match is not None and isinstance(n_layer, int) and int(match[1]) >= n_layer


def adapt(
    checkpoint: Source, choices: Choices, *, family: Family, books: Books | None = None
) -> Adapted:
    """Which GGUF tensors and metadata the checkpoint makes; `books` are a `Ledger` unless given.

    Raises `ConversionError` for a configuration this architecture does not have, and for a tensor
    that is missing, misshapen or unknown. Reads no weights but the MTP block's copies of embedding
    and head, to compare them.
    """
    config = {**family.defaults, **checkpoint.config}
    h = Hyperparameters.read(config)
    ledger = books or Ledger(checkpoint.tensors, h.fp8_block)
    builder = _Builder(checkpoint, h, ledger, family.extras(config))
    builder.root()
    if choices.mtp == "only":
        builder.leave_out(range(h.n_layer), "the trunk is left out (--mtp only)")
    else:
        for i in range(h.n_layer):
            builder.layer(i)
    has_mtp = builder.mtp(choices)
    written, merged = builder.ledger.settle()
    return Adapted(
        architecture=family.architecture,
        kv={
            f"{family.architecture}.{key}": value
            for key, value in (metadata(h, has_mtp) | dict(family.metadata(config))).items()
        },
        tensors=tuple(builder.outputs),
        mtp_block=h.n_layer if has_mtp else None,
        n_written=written,
        n_merged=merged,
        dropped=builder.ledger.dropped,
        notes=tuple(builder.notes),
    )


@dataclass(slots=True)
class _Builder:
    checkpoint: Source
    h: Hyperparameters
    ledger: Books
    extras: Sequence[Extra]
    outputs: list[OutputTensor] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def plain(self, name: str, source: str, shape: tuple[int, ...]) -> None:
        weight = self.ledger.take(source, shape)
        self.outputs.append(OutputTensor(name, shape, (_whole(weight),)))

    def root(self) -> None:
        h = self.h
        self.plain("token_embd.weight", "model.embed_tokens.weight", (h.n_vocab, h.n_embd))
        self.plain("output_norm.weight", "model.norm.weight", (h.n_embd,))
        if not h.tied:
            self.plain("output.weight", "lm_head.weight", (h.n_vocab, h.n_embd))
            return
        self.ledger.drop("lm_head.weight", "config.json ties it to the embedding")
        self.notes.append("embedding and head are tied: llama.cpp uses token_embd for both")

    def layer(self, i: int) -> None:
        for name, source, shape in self._attention():
            self.plain(f"blk.{i}.{name}.weight", f"model.layers.{i}.{source}.weight", shape)
        for extra in self.extras:
            self.plain(f"blk.{i}.{extra.name}", f"model.layers.{i}.{extra.source}", extra.shape)
        self._split_kv_b(i)
        if i < self.h.n_dense:
            self._feed_forward(i, "", "mlp", self.h.n_ff)
        else:
            self._experts(i)
        self.ledger.drop(f"model.layers.{i}.self_attn.rotary_emb.inv_freq", "llama.cpp computes it")

    def _attention(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        h, d = self.h, self.h.n_embd
        yield "attn_norm", "input_layernorm", (d,)
        n_query = h.n_head * (h.d_nope + h.d_rope)
        if h.q_rank:
            yield "attn_q_a", "self_attn.q_a_proj", (h.q_rank, d)
            yield "attn_q_a_norm", "self_attn.q_a_layernorm", (h.q_rank,)
            yield "attn_q_b", "self_attn.q_b_proj", (n_query, h.q_rank)
        else:
            yield "attn_q", "self_attn.q_proj", (n_query, d)
        yield "attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa", (h.kv_rank + h.d_rope, d)
        yield "attn_kv_a_norm", "self_attn.kv_a_layernorm", (h.kv_rank,)
        yield "attn_output", "self_attn.o_proj", (d, h.n_head * h.d_v)
        yield "ffn_norm", "post_attention_layernorm", (d,)

    def _split_kv_b(self, i: int) -> None:
        """MLA run as multi-query attention: each head's key part transposed, and its value part."""
        h = self.h
        name = f"model.layers.{i}.self_attn.kv_b_proj.weight"
        head = h.d_nope + h.d_v
        weight = self.ledger.take(name, (h.n_head * head, h.kv_rank), "merged")
        keys = tuple(SourceRows(weight, k * head, h.d_nope, True) for k in range(h.n_head))
        values = tuple(SourceRows(weight, k * head + h.d_nope, h.d_v) for k in range(h.n_head))
        self.outputs += (
            OutputTensor(f"blk.{i}.attn_k_b.weight", (h.n_head, h.kv_rank, h.d_nope), keys),
            OutputTensor(f"blk.{i}.attn_v_b.weight", (h.n_head, h.d_v, h.kv_rank), values),
        )

    def _feed_forward(self, i: int, suffix: str, source: str, n_ff: int) -> None:
        d = self.h.n_embd
        for name, shape in (("gate", (n_ff, d)), ("up", (n_ff, d)), ("down", (d, n_ff))):
            self.plain(
                f"blk.{i}.ffn_{name}{suffix}.weight",
                f"model.layers.{i}.{source}.{name}_proj.weight",
                shape,
            )

    def _experts(self, i: int) -> None:
        h, d, layer = self.h, self.h.n_embd, f"model.layers.{i}."
        self.plain(f"blk.{i}.ffn_gate_inp.weight", f"{layer}mlp.gate.weight", (h.n_expert, d))
        if h.has_bias:
            bias = f"{layer}mlp.gate.e_score_correction_bias"
            self.plain(f"blk.{i}.exp_probs_b.bias", bias, (h.n_expert,))
        n_ff = h.n_ff_expert
        for name, shape in (("gate", (n_ff, d)), ("up", (n_ff, d)), ("down", (d, n_ff))):
            pieces = tuple(
                _whole(self.ledger.take(layer + _EXPERT.format(e, name), shape, "merged"))
                for e in range(h.n_expert)
            )
            self.outputs.append(
                OutputTensor(f"blk.{i}.ffn_{name}_exps.weight", (h.n_expert, *shape), pieces)
            )
        self._feed_forward(i, "_shexp", "mlp.shared_experts", n_ff * h.n_shared)

    def mtp(self, choices: Choices) -> bool:
        """The block after the trunk. The tensors decide whether there is one."""
        h, i = self.h, self.h.n_layer
        extra = _blocks_after(self.checkpoint, h.n_layer)
        if choices.mtp == "drop":
            self.leave_out(extra, "the MTP block is left out (--mtp drop)")
            return False
        if not extra:
            if choices.mtp == "only" and not h.n_mtp:
                raise ConversionError("the checkpoint has no MTP block to write (--mtp only)")
            if h.n_mtp:
                raise ConversionError(
                    f"config.json declares {h.n_mtp} MTP block, but the checkpoint has no "
                    f"model.layers.{i}.*; --mtp drop converts the trunk alone"
                )
            self.notes.append(
                "no MTP block: the file cannot draft by itself"
                + ("" if h.q_rank else ", nor with another file's block: q_lora_rank is null")
            )
            return False
        if extra != [i] or h.n_mtp > 1:
            raise ConversionError(
                f"{max(len(extra), h.n_mtp)} MTP blocks (layers {extra[0]} to {extra[-1]}), "
                "but llama.cpp runs only one for this architecture"
            )
        if not h.q_rank:
            raise ConversionError(
                f"layer {i} is an MTP block, but q_lora_rank is null and llama.cpp drafts only "
                "with a low-rank query; --mtp drop converts the trunk alone"
            )
        if not h.n_mtp:
            self.notes.append(
                f"config.json declares no MTP block, but layer {i} is one; it is converted"
            )
        self.layer(i)
        self._nextn(i, choices.draft_head)
        return True

    def leave_out(self, layers: Iterable[int], reason: str) -> None:
        prefixes = tuple(f"model.layers.{i}." for i in layers)
        for name in self.checkpoint.tensors:
            if name.startswith(prefixes):
                self.ledger.dropped[name] = reason

    def _nextn(self, i: int, draft_head: bool) -> None:
        d, layer = self.h.n_embd, f"model.layers.{i}."
        for name, source, shape in (
            ("eh_proj", "eh_proj", (d, 2 * d)),
            ("enorm", "enorm", (d,)),
            ("hnorm", "hnorm", (d,)),
            ("shared_head_norm", "shared_head.norm", (d,)),
        ):
            self.plain(f"blk.{i}.nextn.{name}.weight", f"{layer}{source}.weight", shape)
        head = "model.embed_tokens.weight" if self.h.tied else "lm_head.weight"
        self._copy(i, "embed_tokens", f"{layer}embed_tokens.weight", "model.embed_tokens.weight")
        own = f"{layer}shared_head.head.weight"
        if draft_head:
            source = own if self.ledger.has(own) else head
            shape = (self.h.n_vocab, self.h.n_embd)
            self.plain(f"blk.{i}.nextn.shared_head_head.weight", source, shape)
        else:
            self._copy(i, "shared_head_head", own, head)

    def _copy(self, i: int, name: str, source: str, original: str) -> None:
        """The release repeats embedding and head in the block; equal bytes are dropped."""
        if not self.ledger.has(source):
            return
        if self._same_bytes(source, original):
            self.ledger.drop(source, f"bit-equal to {original}, which llama.cpp uses instead")
            return
        self.notes.append(f"{source} differs from {original}: kept")
        self.plain(f"blk.{i}.nextn.{name}.weight", source, (self.h.n_vocab, self.h.n_embd))

    def _same_bytes(self, a: str, b: str) -> bool:
        left, right = self.checkpoint.tensors[a], self.checkpoint.tensors[b]
        if (left.dtype, left.shape) != (right.dtype, right.shape):
            return False
        for at in range(0, left.n_bytes, _COMPARED_AT_ONCE):
            n = min(_COMPARED_AT_ONCE, left.n_bytes - at)
            ours, theirs = bytearray(n), bytearray(n)
            self.checkpoint.read_into(left, at, memoryview(ours))
            self.checkpoint.read_into(right, at, memoryview(theirs))
            if ours != theirs:
                return False
        return True


def _whole(weight: Weight) -> SourceRows:
    return SourceRows(weight, 0, weight.tensor.n_rows)


def _blocks_after(checkpoint: Source, n_layer: int) -> list[int]:
    numbers = {
        int(match[1])
        for name in checkpoint.tensors
        if (match := re.match(r"model\.layers\.(\d+)\.", name))
    }
    return sorted(n for n in numbers if n >= n_layer)
