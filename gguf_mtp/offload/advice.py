"""What a plan means for its owner, in sentences: memory, context, and what more would change."""

from __future__ import annotations

import math
from dataclasses import replace

from gguf_mtp.gguf.bytes_per_token import is_routed, kv_widths
from gguf_mtp.offload.buffers import CELLS, caches
from gguf_mtp.offload.fit import fit
from gguf_mtp.offload.machine import CPU, GIB, Device
from gguf_mtp.offload.parts import Subject
from gguf_mtp.offload.plan import Machine, OffloadPlan, keys_of
from gguf_mtp.offload.predict import Prediction, predict

__all__ = [
    "context_refusal",
    "drafting_advice",
    "gib",
    "largest_context",
    "memory_advice",
    "more_memory",
    "rate",
    "refusal",
    "thrashes",
]

WHOLE_RAM = 0.97
"""Share of the available memory that the CPU's part may take: the system needs some."""


def rate(value: float) -> str:
    """Tokens per second as predicted: two significant digits, `0.53`, `6.0`, `24`, `5,300`."""
    rounded = float(f"{value:.2g}")
    n_decimals = max(0, 1 - math.floor(math.log10(rounded))) if rounded > 0 else 0
    return f"{rounded:,.{n_decimals}f}"


def refusal(plan: OffloadPlan) -> str | None:
    """Why a plan must not be loaded: a device would have to hold more than it has."""
    over = plan.over_budget()
    if not over:
        return None
    device, n = over[0]
    return (
        f"this placement puts {gib(n)} on {device.name}, which has {gib(device.budget)} available "
        f"({gib(device.free)} free, minus a margin of {gib(device.margin)})"
    )


def context_refusal(subject: Subject, machine: Machine) -> str | None:
    """Why a context is too long wherever it lies, said before anything is planned. Rows of unknown
    width are left to llama.cpp."""
    contexts, available = subject.contexts, machine.host.available
    if available is None or kv_widths(subject.facts) is None:
        return None
    n_bytes = sum(caches(subject.facts, contexts)[: subject.n_layers])
    room = available + sum(device.free for device in machine.devices)
    if n_bytes <= room:
        return None
    return (
        f"a context of {contexts.n_cells // contexts.n_seq} tokens for "
        f"{contexts.n_seq} {'sequence' if contexts.n_seq == 1 else 'sequences'} needs "
        f"{gib(n_bytes)}, but this machine has {gib(room)} available; lower -c"
        + ("" if contexts.n_seq == 1 else " or --parallel")
    )


def thrashes(plan: OffloadPlan) -> bool:
    """Whether the CPU's part exceeds the memory, so that every token would read from the disk."""
    available = plan.host.available
    return available is not None and plan.used(CPU) > WHOLE_RAM * available


def memory_advice(plan: OffloadPlan) -> str:
    """The CPU's part against the machine's memory, with the way to load that suits it."""
    n, available = plan.used(CPU), plan.host.available
    if available is None:
        return f"{gib(n)} in CPU memory"
    if thrashes(plan):
        return (
            f"{gib(n)} would be in CPU memory, but only {gib(available)} is available: every token "
            "would wait for the disk; use a smaller type or more device memory, or run it with "
            "--allow-thrash"
        )
    way = "mapped from the file; --no-mmap reads it once and lets the CPU's kernels repack it"
    if n > 0.8 * available:
        way = "keep it mapped: --no-mmap would leave little memory for anything else"
    return f"{gib(n)} in CPU memory, of {gib(available)} available: {way}"


def more_memory(plan: OffloadPlan, subject: Subject, machine: Machine) -> str:
    """What the next part is that did not fit, and what it would bring."""
    places = {(t.file, t.name): t.device for t in plan.tensors}
    for part in subject.parts():
        if part.kind == "embedding" or places[part.tensors[0].file, part.tensors[0].name] != CPU:
            continue
        if not keys_of(part, subject):
            continue
        what = {
            "block": "the MTP block",
            "attention": f"the attention of layer {part.layer} with its cache",
            "dense": f"the dense layer {part.layer}",
            "head": "the output head",
            "block experts": "the MTP block's routed experts",
        }.get(part.kind, "the routed experts of one more layer")
        size = part.n_bytes + (plan.caches[part.layer] if part.has_cache else 0)
        if not machine.devices:
            return f"no device: {_with_a_card(plan, subject, machine)}"
        gained = _doubled(plan, subject, machine)
        return f"{gib(size)} more device memory would hold {what}; {gained}"
    return "everything is on devices: more memory would only allow a longer context"


def drafting_advice(plan: OffloadPlan, prediction: Prediction) -> list[str]:
    """Whether drafting is predicted to pay, and why not."""
    if not prediction.by_depth:
        return []
    depth, rate = max(prediction.by_depth.items(), key=lambda item: item[1])
    if rate > prediction.plain:
        gain = rate / prediction.plain
        return [f"drafting pays: drafts of {depth} are predicted to be {gain:.2f} x as fast"]
    held = sum(t.n_bytes for t in plan.tensors if t.device == CPU and is_routed(t.name))
    where = f", and {gib(held)} of them lie in the CPU's memory" if held else ""
    return [
        "drafting is predicted not to pay: a drafted token is checked with experts of its own"
        f"{where}; only what the text repeats, or tokens that share experts, would"
    ]


def _doubled(plan: OffloadPlan, subject: Subject, machine: Machine) -> str:
    bigger = tuple(replace(d, free=2 * d.free) for d in machine.devices)
    then = predict(fit(subject, replace(machine, devices=bigger)), subject).best
    now = predict(plan, subject).best
    if rate(then) == rate(now):
        return "twice the device memory would not make it faster"
    return f"with twice the device memory, a predicted {rate(then)} tokens/s instead of {rate(now)}"


def _with_a_card(plan: OffloadPlan, subject: Subject, machine: Machine) -> str:
    card = Device("GPU0", 24 * GIB)
    then = predict(fit(subject, replace(machine, devices=(card,))), subject).best
    return (
        f"with a 24 GiB GPU, a predicted {rate(then)} tokens/s instead of "
        f"{rate(predict(plan, subject).best)}"
    )


def largest_context(subject: Subject, machine: Machine) -> int:
    """The most cells with which every attention and cache still lies on a device, at most the
    model's context; without devices, with which the CPU's part still fits the memory. 0: none."""
    low, high = 0, subject.facts.context_length // CELLS
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _holds(subject, machine, middle) else (low, middle - 1)
    return low * CELLS


def _holds(subject: Subject, machine: Machine, n: int) -> bool:
    contexts = replace(subject.contexts, n_cells=n * CELLS)
    plan = fit(replace(subject, contexts=contexts), machine)
    return CPU not in plan.layers if machine.devices else not thrashes(plan)


def gib(n_bytes: float) -> str:
    """For people: "12.3 GiB", "512 MiB"."""
    if n_bytes >= GIB:
        return f"{n_bytes / GIB:.1f} GiB"
    return f"{n_bytes / (1 << 20):.1f} MiB"
