"""DeepSeek-V4's names and shapes: residual streams, compressed keys, experts in FP4.

Names and shapes are those of llama.cpp's `deepseek4` graph. An MTP block becomes a file of its own
whatever is asked for: it has an `hc_head` of its own, which that graph reads under the trunk's
name. So do the stages of DSpark, which draft whole blocks (llama.cpp's `dflash` graph). Which of
the two V4 checkpoints hold under `mtp.*` is told by its tensors.

It knows nothing of types, quantisation or files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ConversionError
from ..gguf.arch.deepseek4 import CSA
from .hyper_config import ARCHITECTURE, STAGES_ARCHITECTURE, Dspark, HyperConfig
from .hyper_template import chat_template
from .ledger import Ledger
from .mla import Choices, Mtp
from .tensors import Adapted, Books, OutputTensor, Side, Source, SourceRows, Value, Weight

__all__ = ["adapt", "needs"]

_ROOT = {"embed.weight": "token_embd", "norm.weight": "output_norm", "head.weight": "output"}
_MTP, _DSPARK = "mtp.0.e_proj.weight", "mtp.0.main_proj.weight"
_VISION = ("aligner.", "image_", "vision.")
_HEAD_PARTS = ("fn", "base", "scale")
_LABEL = {"mtp": "MTP block", "dspark": "DSpark drafter"}


def needs(_: Mapping[str, Any], mtp: Mtp, name: str) -> bool:
    """Whether the tensor `name` is read at all, so that shards without any can stay away."""
    return mtp != "only" or name in _ROOT or name.startswith("mtp.")


def scale_name(name: str) -> str:
    return f"{name.removesuffix('.weight')}.scale"


def adapt(checkpoint: Source, choices: Choices, *, books: Books | None = None) -> Adapted:
    """As `mla.adapt`. With `mtp` "keep" the trunk; `Adapted.side` names the drafter that a run with
    "only" has to write."""
    h = HyperConfig.read(checkpoint.config)
    builder = _Builder(h, books or Ledger(checkpoint.tensors, h.fp8_block, scale_name), checkpoint)
    side = _drafter(checkpoint)
    if choices.mtp != "only":
        return builder.trunk(side, choices.mtp)
    if side is None:
        raise ConversionError("the checkpoint holds no MTP block to write (--mtp only)")
    return builder.side_file() if side == "mtp" else builder.stages()


def _drafter(checkpoint: Source) -> Side | None:
    """What `mtp.*` is: configurations of DSpark releases name an MTP block that is not there."""
    if _DSPARK in checkpoint.tensors:
        return "dspark"
    return "mtp" if _MTP in checkpoint.tensors else None


@dataclass(slots=True)
class _Builder:
    h: HyperConfig
    books: Books
    checkpoint: Source
    outputs: list[OutputTensor] = field(default_factory=list)

    def trunk(self, side: Side | None, mtp: Mtp) -> Adapted:
        h = self.h
        self._root("")
        for i in range(h.n_layer):
            self._layer(f"layers.{i}.", i, h.ratios[i], is_hash=i < h.n_hash)
        why = "it is no drafter" if side is None else f"the {_LABEL[side]} is a file of its own"
        self._leave_out("mtp.", "the drafter is left out (--mtp drop)" if mtp == "drop" else why)
        notes = ("no MTP block: copies draft",) if side is None and mtp == "keep" else ()
        kept = side if mtp == "keep" else None
        return self._adapted(h.metadata(has_block=False), side=kept, notes=notes)

    def side_file(self) -> Adapted:
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
        self._leave_out("layers.", "the trunk is left out (--mtp only)")
        self._leave_out("hc_head_", "the MTP block has its own")
        return self._adapted(h.metadata(has_block=True), mtp_block=i)

    def stages(self) -> Adapted:
        """DSpark: its stages, what fuses the trunk's layers, and its Markov and confidence heads;
        embedding and head are the trunk's."""
        h = self.h
        numbers = {
            int(name.split(".")[1]) for name in self.checkpoint.tensors if name.startswith("mtp.")
        }
        d = Dspark.read(self.checkpoint.config, n_stage=max(numbers) + 1)
        for i in range(d.n_stage):
            self._layer(f"mtp.{i}.", i, 0, is_hash=False)
        last, n_embd = f"mtp.{d.n_stage - 1}.", h.n_embd
        fused = (n_embd, len(d.layer_inputs) * n_embd)
        self._plain("fc.weight", "mtp.0.main_proj.weight", fused)
        self._plain("enc.output_norm.weight", "mtp.0.main_norm.weight", (n_embd,))
        self._plain("output_norm.weight", f"{last}norm.weight", (n_embd,))
        self._streams("output_hc", f"{last}hc_head", h.n_stream, 1)
        for i in (1, 2):
            markov = f"{last}markov_head.markov_w{i}.weight"
            self._plain(f"markov_w{i}.weight", markov, (h.n_vocab, d.rank))
        sure = f"{last}confidence_head.proj.weight"
        self._plain("conf_proj.weight", sure, (1, n_embd + d.rank))
        for prefix in ("layers.", *_ROOT, "hc_head_"):
            self._leave_out(prefix, "the trunk is left out (--mtp only)")
        return self._adapted(h.stages_metadata(d), mask=d.mask)

    def _adapted(
        self,
        kv: Mapping[str, Value],
        mtp_block: int | None = None,
        side: Side | None = None,
        mask: int | None = None,
        notes: tuple[str, ...] = (),
    ) -> Adapted:
        for prefix in _VISION:
            self._leave_out(prefix, "llama.cpp's text model has no images")
        written, merged = self.books.settle()
        is_dspark = mask is not None
        architecture = STAGES_ARCHITECTURE if is_dspark else ARCHITECTURE
        named = {f"{architecture}.{key}": value for key, value in kv.items()}
        if mask is not None:
            named["tokenizer.ggml.mask_token_id"] = mask
        return Adapted(
            architecture=architecture,
            kv=named,
            tensors=tuple(self.outputs),
            mtp_block=mtp_block,
            n_written=written,
            n_merged=merged,
            dropped=self.books.dropped,
            notes=notes,
            side=side,
            is_dspark=is_dspark,
            chat_template=None if is_dspark else chat_template,
        )

    def _leave_out(self, prefix: str, reason: str) -> None:
        for name in self.checkpoint.tensors:
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
        images = f"{source}gate.bias_vl"
        if source.startswith("layers.") and self.books.has(images):
            self._plain(f"{blk}exp_probs_b_vl.bias", images, (h.n_expert,))
        else:
            self.books.drop(images, "llama.cpp drafts no images")

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
