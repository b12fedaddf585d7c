"""The plan that a user writes: llama.cpp's own options, spelled out as the same `OffloadPlan`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from gguf_mtp.errors import RequestError
from gguf_mtp.gguf.bytes_per_token import is_routed, layer_of
from gguf_mtp.offload.machine import CPU, names
from gguf_mtp.offload.parts import Subject
from gguf_mtp.offload.plan import Machine, OffloadPlan, assemble, key_of
from gguf_mtp.types import TensorInfo

__all__ = ["ByHand", "manual"]


@dataclass(frozen=True, slots=True)
class ByHand:
    """What was asked for. `n_gpu_layers` counts from the last layer on, the output and the MTP
    block included; None or negative: all. `draft_ngl` 0 leaves the MTP block with the CPU, any
    other number puts it on a device; None: as `n_gpu_layers` says. `cpu_moe` is how many first
    layers leave their routed experts with the CPU (negative: all). `overrides` are (pattern,
    device), the first match wins; `split` shares of layers by device."""

    n_gpu_layers: int | None = None
    draft_ngl: int | None = None
    split: tuple[float, ...] = ()
    overrides: tuple[tuple[str, str], ...] = ()
    cpu_moe: int = 0

    @property
    def is_empty(self) -> bool:
        return self == ByHand()


def manual(subject: Subject, machine: Machine, hand: ByHand) -> OffloadPlan:
    """Raises `RequestError` for devices and patterns that do not exist."""
    _check(machine, hand)
    n_layer, n_all = subject.facts.n_layer, subject.n_layers
    devices = _layer_devices(subject, machine, hand)
    layers, head = devices[:-1], devices[-1]
    if subject.contexts.drafts and hand.draft_ngl is not None:
        on_device = machine.devices[-1].name if machine.devices else CPU
        layers[n_layer] = CPU if hand.draft_ngl == 0 else on_device
    places = {}
    for tensor in subject.tensors:
        key = key_of(tensor.name, tensor.file, subject)
        places[key] = _place(tensor, layers, head, hand, n_all)
        if key != tensor.name:  # of a side file: all beside its block
            places[key] = CPU if tensor.name.startswith("token_embd") else layers[n_layer]
    if subject.is_tied:
        places["output.weight"] = head
    return assemble(subject, machine, places, layers)


def _layer_devices(subject: Subject, machine: Machine, hand: ByHand) -> list[str]:
    """llama.cpp's rule for each layer and the output, with shares by free memory by default."""
    n = subject.n_layers + 1
    wanted = hand.n_gpu_layers
    n_gpu = n if wanted is None or wanted < 0 else min(wanted, n)
    if not machine.devices:
        return [CPU] * n
    shares = hand.split or tuple(float(d.budget) for d in machine.devices)
    total = sum(shares) or 1.0
    ends = [sum(shares[: i + 1]) / total for i in range(len(shares))]
    out = [CPU] * (n - n_gpu)
    for i in range(n_gpu):
        at = next((k for k, end in enumerate(ends) if i / n_gpu < end), len(ends) - 1)
        out.append(machine.devices[at].name)
    return out


def _place(tensor: TensorInfo, layers: Sequence[str], head: str, hand: ByHand, n_all: int) -> str:
    for pattern, device in hand.overrides:
        if re.search(pattern, tensor.name):
            return device
    layer = layer_of(tensor.name)
    if layer is None:
        return head if tensor.name.startswith("output") else CPU
    kept = n_all if hand.cpu_moe < 0 else hand.cpu_moe
    return CPU if is_routed(tensor.name) and layer < kept else layers[layer]


def _check(machine: Machine, hand: ByHand) -> None:
    known = (CPU, *[d.name for d in machine.devices])
    there = names(machine.devices) or "none"
    if not machine.devices and (hand.n_gpu_layers or 0) > 0:
        raise RequestError(f"-ngl is {hand.n_gpu_layers}, but llama.cpp finds no device here")
    if hand.split and len(hand.split) != len(machine.devices):
        raise RequestError(
            f"--tensor-split has {len(hand.split)} shares, but the devices are {there}"
        )
    if hand.split and (min(hand.split) < 0 or not sum(hand.split)):
        raise RequestError("--tensor-split shares must be 0 or more, and at least one above 0")
    for pattern, device in hand.overrides:
        if device not in known:
            raise RequestError(
                f"--override-tensor {pattern}={device} does not name a device; available: "
                f"{', '.join(known)}"
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise RequestError(
                f"--override-tensor {pattern!r} is not a regular expression: {error}"
            ) from None
