"""DeepSeek-V4's names and shapes: residual streams, compressed keys, experts in FP4.

Names and shapes are those of llama.cpp's `deepseek4` graph. An MTP block becomes a file of its own
whatever is asked for: it has an `hc_head` of its own, which that graph reads under the trunk's
name. What V4 checkpoints hold under `mtp.*` is told apart by its tensors; configurations of DSpark
releases name an MTP block that is not there.

It knows nothing of types, quantisation or files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ConversionError
from ..gguf.arch.deepseek4 import CSA
from .hyper_config import ARCHITECTURE, HyperConfig
from .hyper_template import chat_template
from .ledger import Ledger
from .mla import Choices, Mtp
from .tensors import Adapted, Books, OutputTensor, Source, SourceRows, Weight

__all__ = ["adapt", "needs"]

_ROOT = {"embed.weight": "token_embd", "norm.weight": "output_norm", "head.weight": "output"}
_MTP, _DSPARK = "mtp.0.e_proj.weight", "mtp.0.main_proj.weight"
_VISION = ("aligner.", "image_", "vision.")
_HEAD_PARTS = ("fn", "base", "scale")


def needs(_: Mapping[str, Any], mtp: Mtp, name: str) -> bool:
    """Whether the tensor `name` is read at all, so that shards without any can stay away."""
    return mtp != "only" or name in _ROOT or name.startswith("mtp.")


def scale_name(name: str) -> str:
    return f"{name.removesuffix('.weight')}.scale"


def adapt(checkpoint: Source, choices: Choices, *, books: Books | None = None) -> Adapted:
    """As `mla.adapt`. With `mtp` "keep" the trunk; `Adapted.has_side` says that a run with "only"
    has the rest to write."""
    h = HyperConfig.read(checkpoint.config)
    ledger = books or Ledger(checkpoint.tensors, h.fp8_block, scale_name)
    has_block, has_dspark = (name in checkpoint.tensors for name in (_MTP, _DSPARK))
    builder = _Builder(h, ledger)
    if choices.mtp == "only":
        if not has_block:
            what = "a DSpark drafter, which is not supported yet," if has_dspark else "no MTP block"
            raise ConversionError(f"the checkpoint holds {what} to write (--mtp only)")
        builder.side_file()
        builder.leave_out(checkpoint, "layers.", "the trunk is left out (--mtp only)")
        builder.leave_out(checkpoint, "hc_head_", "the MTP block has its own")
    else:
        builder.trunk()
        builder.leave_out(checkpoint, "mtp.", _reason(choices.mtp, has_block, has_dspark))
    for prefix in _VISION:
        builder.leave_out(checkpoint, prefix, "llama.cpp's text model has no images")
    written, merged = ledger.settle()
    is_side = choices.mtp == "only"
    kv = {f"{ARCHITECTURE}.{key}": v for key, v in h.metadata(has_block=is_side).items()}
    return Adapted(
        architecture=ARCHITECTURE,
        kv=kv,
        tensors=tuple(builder.outputs),
        mtp_block=h.n_layer if is_side else None,
        n_written=written,
        n_merged=merged,
        dropped=ledger.dropped,
        notes=tuple(_notes(choices.mtp, has_block, has_dspark)),
        has_side=has_block and choices.mtp == "keep",
        chat_template=chat_template,
    )


def _reason(mtp: Mtp, has_block: bool, has_dspark: bool) -> str:
    if mtp == "drop":
        return "the MTP block is left out (--mtp drop)"
    if has_dspark:
        return "DSpark drafters are not supported yet"
    return "the MTP block is a file of its own" if has_block else "it is no MTP block"


def _notes(mtp: Mtp, has_block: bool, has_dspark: bool) -> Iterator[str]:
    if has_dspark:
        yield "the checkpoint's drafter is DSpark, which is not supported yet: copies draft"
    elif not has_block and mtp == "keep":
        yield "no MTP block: copies draft"


@dataclass(slots=True)
class _Builder:
    h: HyperConfig
    books: Books
    outputs: list[OutputTensor] = field(default_factory=list)

    def trunk(self) -> None:
        self._root("")
        for i in range(self.h.n_layer):
            self._layer(f"layers.{i}.", i, self.h.ratios[i], is_hash=i < self.h.n_hash)

    def side_file(self) -> None:
        """The block, with embedding, norm and head, and its own way from streams to one row."""
        h, i = self.h, self.h.n_layer
        self._root("mtp.0.")
        self._layer("mtp.0.", i, 0, is_hash=False)
        both = tuple(
            _whole(self.books.take(f"mtp.0.{part}_proj.weight", (h.n_embd, h.n_embd), "merged"))
            for part in ("e", "h")
        )
        shape = (h.n_embd, 2 * h.n_embd)
        self.outputs.append(OutputTensor(f"blk.{i}.nextn.eh_proj.weight", shape, both, beside=True))
        for name, source in (("enorm", "enorm"), ("hnorm", "hnorm"), ("shared_head_norm", "norm")):
            self._plain(f"blk.{i}.nextn.{name}.weight", f"mtp.0.{source}.weight", (h.n_embd,))

    def leave_out(self, checkpoint: Source, prefix: str, reason: str) -> None:
        for name in checkpoint.tensors:
            if name.startswith(prefix):
                self.books.drop(name, reason)

    def _root(self, prefix: str) -> None:
        h = self.h
        for source, name in _ROOT.items():
            shape = (h.n_embd,) if source == "norm.weight" else (h.n_vocab, h.n_embd)
            self._plain(f"{name}.weight", source, shape)
        self._streams("output_hc", f"{prefix}hc_head", h.n_stream, 1)

    def _streams(self, name: str, source: str, n_mix: int, n_scale: int) -> None:
        h = self.h
        shapes = ((n_mix, h.n_stream * h.n_embd), (n_mix,), (n_scale,))
        for part, shape in zip(_HEAD_PARTS, shapes, strict=True):
            self._plain(f"{name}_{part}.weight", f"{source}_{part}", shape)

    def _layer(self, source: str, i: int, ratio: int, is_hash: bool) -> None:
        h, blk = self.h, f"blk.{i}."
        for name, at, shape in self._attention():
            self._plain(f"{blk}{name}.weight", f"{source}{at}", shape)
        for part in ("attn", "ffn"):
            n_mix = (2 + h.n_stream) * h.n_stream
            self._streams(f"{blk}hc_{part}", f"{source}hc_{part}", n_mix, 3)
        if ratio:
            width = h.d_head * (2 if ratio == CSA else 1)
            self._compressor(f"{blk}attn", f"{source}attn.", width, h.d_head, ratio)
        if ratio == CSA:
            index, to = f"{source}attn.indexer.", f"{blk}indexer"
            self._compressor(to, index, 2 * h.d_index, h.d_index, ratio)
            n_query = h.n_index_head * h.d_index
            self._plain(f"{to}.attn_q_b.weight", f"{index}wq_b.weight", (n_query, h.q_rank))
            proj = (h.n_index_head, h.n_embd)
            self._plain(f"{to}.proj.weight", f"{index}weights_proj.weight", proj)
        self._route(f"{source}ffn.", blk, is_hash)
        self._experts(f"{source}ffn.", blk)

    def _attention(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        h, d = self.h, self.h.n_embd
        n_query = h.n_head * h.d_head
        yield "attn_norm", "attn_norm.weight", (d,)
        yield "attn_sinks", "attn.attn_sink", (h.n_head,)
        yield "attn_q_a", "attn.wq_a.weight", (h.q_rank, d)
        yield "attn_q_a_norm", "attn.q_norm.weight", (h.q_rank,)
        yield "attn_q_b", "attn.wq_b.weight", (n_query, h.q_rank)
        yield "attn_kv", "attn.wkv.weight", (h.d_head, d)
        yield "attn_kv_a_norm", "attn.kv_norm.weight", (h.d_head,)
        n_out = h.n_out_group * h.out_rank
        yield "attn_output_a", "attn.wo_a.weight", (n_out, n_query // h.n_out_group)
        yield "attn_output_b", "attn.wo_b.weight", (d, n_out)
        yield "ffn_norm", "ffn_norm.weight", (d,)

    def _compressor(self, to: str, source: str, width: int, head: int, ratio: int) -> None:
        at = f"{source}compressor."
        for name, part, shape in (
            ("ape", "ape", (ratio, width)),
            ("kv", "wkv.weight", (width, self.h.n_embd)),
            ("gate", "wgate.weight", (width, self.h.n_embd)),
            ("norm", "norm.weight", (head,)),
        ):
            self._plain(f"{to}_compressor_{name}.weight", f"{at}{part}", shape)

    def _route(self, source: str, blk: str, is_hash: bool) -> None:
        h = self.h
        self._plain(f"{blk}ffn_gate_inp.weight", f"{source}gate.weight", (h.n_expert, h.n_embd))
        if is_hash:
            shape = (h.n_vocab, h.n_expert_used)
            ids = self.books.take_indices(f"{source}gate.tid2eid", shape)
            name = f"{blk}ffn_gate_tid2eid.weight"
            self.outputs.append(OutputTensor(name, shape, (_whole(ids),), is_index=True))
            self.books.drop(f"{source}gate.bias", "a hash layer looks its experts up by token")
        else:
            self._plain(f"{blk}exp_probs_b.bias", f"{source}gate.bias", (h.n_expert,))
        self.books.drop(
            f"{source}gate.bias_vl", "it routes the rows of images, which are not converted"
        )

    def _experts(self, source: str, blk: str) -> None:
        h = self.h
        up, down = (h.n_ff_expert, h.n_embd), (h.n_embd, h.n_ff_expert)
        for name, part, shape in (("gate", "w1", up), ("down", "w2", down), ("up", "w3", up)):
            pieces = tuple(
                _whole(self.books.take(f"{source}experts.{e}.{part}.weight", shape, "merged"))
                for e in range(h.n_expert)
            )
            stacked = (h.n_expert, *shape)
            self.outputs.append(OutputTensor(f"{blk}ffn_{name}_exps.weight", stacked, pieces))
            shared = tuple(n * h.n_shared if n == h.n_ff_expert else n for n in shape)
            at = f"{source}shared_experts.{part}.weight"
            self._plain(f"{blk}ffn_{name}_shexp.weight", at, shared)

    def _plain(self, name: str, source: str, shape: tuple[int, ...]) -> None:
        weight = self.books.take(source, shape)
        self.outputs.append(OutputTensor(name, shape, (_whole(weight),)))


def _whole(weight: Weight) -> SourceRows:
    return SourceRows(weight, 0, weight.tensor.n_rows)
