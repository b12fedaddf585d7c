"""Tokens per second from bytes over bandwidth: a prediction, not a measurement.

Decoding reads every weight of a layer once for all rows of a batch, but of routed experts those
that any row picked: E(1 - (1 - k/E)^m) of E for m rows that pick at random. Devices work one after
the other, since a layer needs the one before. What this leaves out: transfers between devices,
computing, and that neighbouring tokens share experts.
"""

from __future__ import annotations

from typing import NamedTuple

from gguf_mtp.gguf.arch import dflash
from gguf_mtp.gguf.bytes_per_token import expert_share, is_routed
from gguf_mtp.gguf.cache_layout import Kept, kept
from gguf_mtp.offload.machine import CPU
from gguf_mtp.offload.parts import Subject
from gguf_mtp.offload.plan import OffloadPlan, Placed

__all__ = ["ACCEPTANCE", "DEPTHS", "Prediction", "predict"]

ACCEPTANCE = 0.8
"""Assumed probability that a draft token is accepted when those before it were (DeepSeek-V3's
report, arXiv 2412.19437, gives 0.85 to 0.90 for the first)."""
DEPTHS = (1, 2, 3)
FILL = 0.5
"""Share of the context that is assumed to be filled."""


class Prediction(NamedTuple):
    """Tokens a second of one sequence, plain and for each draft depth."""

    plain: float
    by_depth: dict[int, float]

    @property
    def best(self) -> float:
        return max(self.plain, *self.by_depth.values(), 0.0)


def predict(plan: OffloadPlan, subject: Subject) -> Prediction:
    plain = 1.0 / seconds(plan, subject, 1)
    if not plan.has_block:
        return Prediction(plain, {})
    shape = dflash.shape(subject.side)
    draft = _draft_seconds(plan, subject, shape.size if shape else 1)
    by_depth = {}
    for depth in DEPTHS:
        n_tokens = sum(ACCEPTANCE**k for k in range(depth + 1))
        drafting = draft if shape else depth * draft
        by_depth[depth] = n_tokens / (seconds(plan, subject, 1 + depth) + drafting)
    return Prediction(plain, by_depth)


def seconds(plan: OffloadPlan, subject: Subject, n_rows: int) -> float:
    """Of a target decode of `n_rows` rows."""
    share = expert_share(subject.facts, n_rows)
    total = 0.0
    for tensor in plan.tensors:
        if tensor.name == "token_embd.weight" or _is_blocks(tensor, plan):
            continue
        n_bytes = tensor.n_bytes * (share if is_routed(tensor.name) else 1.0)
        total += n_bytes / bandwidth(plan, tensor.device)
    kinds = kept(subject.facts.kv, subject.facts.architecture, plan.n_layer)
    return total + sum(_cache_seconds(plan, i, what) for i, what in enumerate(kinds))


def _cache_seconds(plan: OffloadPlan, layer: int, what: Kept) -> float:
    """Of rows, those there are; of states, one."""
    contexts = plan.contexts
    share = FILL if what == "rows" else 1 / (contexts.n_seq * (1 + contexts.n_rewind))
    return share * plan.caches[layer] / bandwidth(plan, plan.cache_device(layer))


def _draft_seconds(plan: OffloadPlan, subject: Subject, n_rows: int) -> float:
    """Of one draft step: the block for `n_rows` rows, its cache, and the head it predicts with."""
    share = expert_share(subject.facts, n_rows)
    block = [t for t in plan.tensors if _is_blocks(t, plan)]
    has_own_head = any(
        t.name == "output.weight" or t.name.endswith("nextn.shared_head_head.weight") for t in block
    )
    read = [t for t in block if t.name != "token_embd.weight"]
    if not has_own_head:
        read += [t for t in plan.tensors if t.name == "output.weight"]
    total = sum(
        t.n_bytes * (share if is_routed(t.name) else 1.0) / bandwidth(plan, t.device) for t in read
    )
    return total + _cache_seconds(plan, plan.n_layer, "rows")


def _is_blocks(tensor: Placed, plan: OffloadPlan) -> bool:
    layer = plan.layer_of(tensor)
    return tensor.file == plan.side or (layer is not None and layer >= plan.n_layer)


def bandwidth(plan: OffloadPlan, device: str) -> float:
    if device == CPU:
        return plan.host.bandwidth
    return next(d.bandwidth for d in plan.devices if d.name == device)
