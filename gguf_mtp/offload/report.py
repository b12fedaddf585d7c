"""A plan as plain JSON values and as rows of a table. It knows no terminal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gguf_mtp.gguf.bytes_per_token import is_routed
from gguf_mtp.offload.advice import (
    drafting_advice,
    gib,
    largest_context,
    memory_advice,
    more_memory,
    refusal,
    thrashes,
)
from gguf_mtp.offload.machine import CPU
from gguf_mtp.offload.parts import Subject
from gguf_mtp.offload.plan import Machine, OffloadPlan, Placed
from gguf_mtp.offload.predict import ACCEPTANCE, predict

__all__ = ["HEADINGS", "account", "document", "line", "rows"]

HEADINGS = ("layer", "attention, shared, dense", "routed experts", "KV cache")


def document(plan: OffloadPlan, subject: Subject, machine: Machine) -> dict[str, Any]:
    """`fits` (False: `load` refuses it), `devices`, `tensors`, `context` and `predicted`; the CPU
    is the last device, its budget the machine's memory (None: unknown). Bytes throughout, rates in
    tokens a second."""
    contexts = plan.contexts
    without = replace(subject, contexts=replace(contexts, n_draft_batch=0), side=None)
    prediction = predict(plan, subject)
    return {
        "model": subject.facts.name or subject.facts.path,
        "fits": refusal(plan) is None and not thrashes(plan),
        "devices": [
            {"name": d.name, "budget": d.budget, "used": plan.used(d.name)} for d in plan.devices
        ]
        + [{"name": CPU, "budget": plan.host.available, "used": plan.used(CPU)}],
        "tensors": [{"name": t.name, "bytes": t.n_bytes, "device": t.device} for t in plan.tensors],
        "layers": list(plan.layers),
        "context": {
            "cells": contexts.n_cells,
            "parallel": contexts.n_seq,
            "cache_type_k": contexts.cache_k,
            "cache_type_v": contexts.cache_v,
            "cache_bytes": {d: plan.cache(d) for d in _places(plan)},
            "buffer_bytes": dict(plan.compute),
            "op_offload": contexts.op_offload,
            "most_cells_with_mtp": largest_context(subject, machine) if plan.has_block else None,
            "most_cells_without_mtp": largest_context(without, machine),
        },
        "predicted": {
            "plain": round(prediction.plain, 3),
            "by_depth": {str(k): round(v, 3) for k, v in prediction.by_depth.items()},
            "acceptance_assumed": ACCEPTANCE,
            "bandwidth": {d.name: d.bandwidth for d in plan.devices} | {CPU: plan.host.bandwidth},
        },
        "advice": [
            refusal(plan) or memory_advice(plan),
            more_memory(plan, subject, machine),
            *drafting_advice(plan, prediction),
        ],
    }


def account(plan: OffloadPlan) -> dict[str, Any]:
    """Of a draft model: `model`, and `devices` with bytes of weights, cache and buffers on each."""
    return {
        "model": plan.tensors[0].file,
        "devices": [
            {
                "name": name,
                "used": plan.used(name),
                "weights": plan.weights(name),
                "cache_bytes": plan.cache(name),
                "buffer_bytes": plan.compute.get(name, 0),
            }
            for name in _places(plan)
        ],
    }


def _places(plan: OffloadPlan) -> list[str]:
    return [*(d.name for d in plan.devices), CPU]


def rows(plan: OffloadPlan) -> list[tuple[str, str, str, str]]:
    """One row a layer, then embedding and output: bytes and device of each part."""
    out = []
    for i in range(len(plan.layers)):
        own = [t for t in plan.tensors if plan.layer_of(t) == i]
        routed = [t for t in own if is_routed(t.name)]
        rest = [t for t in own if not is_routed(t.name)]
        name = f"{i} ({plan.drafter})" if i == plan.n_layer else str(i)
        cache = f"{gib(plan.caches[i])} {plan.cache_device(i)}"
        out.append((name, _where(rest), _where(routed), cache))
    for label, prefix in (("embedding", "token_embd"), ("output", "output")):
        own = [t for t in plan.tensors if _is_part(t, prefix, plan)]
        out.append((label, _where(own), "", ""))
    return out


def _is_part(tensor: Placed, prefix: str, plan: OffloadPlan) -> bool:
    return tensor.name.startswith(prefix) and plan.layer_of(tensor) is None


def _where(tensors: list[Placed]) -> str:
    """ "1.2 GiB GPU0 + 300 MiB CPU"."""
    sums: dict[str, int] = {}
    for tensor in tensors:
        sums[tensor.device] = sums.get(tensor.device, 0) + tensor.n_bytes
    return " + ".join(f"{gib(n)} {device}" for device, n in sums.items())


def line(plan: OffloadPlan) -> str:
    """One line: "GPU0 22 GiB (62 layers, output), CPU 367 GiB (experts of 58 layers)"."""
    parts = []
    for name in _places(plan):
        n_layers = plan.layers.count(name)
        routed = {plan.layer_of(t) for t in plan.tensors if t.device == name and is_routed(t.name)}
        held = [f"{n_layers} layers"] if n_layers else []
        held += ["output"] if plan.head == name else []
        held += [f"experts of {len(routed)} layers"] if routed else []
        if held or name == CPU:
            parts.append(
                f"{name} {gib(plan.used(name))}" + (f" ({', '.join(held)})" if held else "")
            )
    return ", ".join(parts)
