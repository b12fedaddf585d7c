"""A draft model beside its target: what it takes, and where it lies.

It is placed first, and the target into what that leaves: all of its bytes are read for every
drafted token, of the target's once a round. Knows no drafter.
"""

from __future__ import annotations

from dataclasses import replace

from gguf_mtp.offload import Contexts, Subject
from gguf_mtp.offload.options import PlacementOptions
from gguf_mtp.placement import context_size
from gguf_mtp.placement.checked_plan import CheckedPlan, plan_placement
from gguf_mtp.types import ModelFacts

__all__ = ["draft_subject", "place_draft_model"]


def draft_subject(facts: ModelFacts, target: Contexts) -> Subject:
    """The draft model with a context for the target's sequences, which makes no drafts itself."""
    sizes = context_size.contexts(target.n_cells // target.n_seq, target.n_seq)
    return Subject(facts, replace(sizes, cache_k=target.cache_k, cache_v=target.cache_v))


def place_draft_model(
    facts: ModelFacts | None, target: Contexts, options: PlacementOptions
) -> CheckedPlan | None:
    """As `checked_plan.plan_placement`, of the draft model, if there is one. What is said of single
    layers and tensors is said of the target; "-ngl 0" is said of all. Other machines are left to
    the target: a draft's steps are too short for a network."""
    if facts is None:
        return None
    n = options.draft_ngl
    if n is None and options.n_gpu_layers == 0:
        n = 0
    own = replace(
        options, n_gpu_layers=n, draft_ngl=None, split=(), overrides=(), cpu_moe=0, rpc=()
    )
    return plan_placement(draft_subject(facts, target), own)
