"""A placement as a value: which tensor, which layer's cache and which buffers lie where.

One object is made by `fit` or by `manual`, shown to people, checked against llama.cpp, and applied
to the load. It decides nothing itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from gguf_mtp.gguf.arch import dflash
from gguf_mtp.gguf.bytes_per_token import is_routed, layer_of
from gguf_mtp.offload.buffers import Contexts, Rooms, rooms
from gguf_mtp.offload.machine import CPU, Device, Host
from gguf_mtp.offload.parts import ModelPart, Subject

__all__ = ["Machine", "OffloadPlan", "Placed", "assemble"]


class Placed(NamedTuple):
    """A tensor of `n_bytes` in `file` on the device of that name."""

    name: str
    n_bytes: int
    device: str
    file: str


@dataclass(frozen=True, slots=True)
class Machine:
    """Devices in the order that layers take them, and the memory beside the CPU. `reserve` are
    bytes more to keep free of a device than estimated: what a check against llama.cpp found."""

    devices: tuple[Device, ...] = ()
    host: Host = field(default_factory=Host)
    reserve: Mapping[str, int] = field(default_factory=dict)

    def without(self, plan: OffloadPlan) -> Machine:
        """What another model leaves of it that is placed as in `plan`."""
        devices = tuple(replace(d, free=d.free - plan.used(d.name)) for d in self.devices)
        available = self.host.available
        left = None if available is None else max(available - plan.used(CPU), 0)
        return replace(self, devices=devices, host=replace(self.host, available=left))


@dataclass(frozen=True, slots=True)
class OffloadPlan:
    """`layers[i]` names the device that computes layer i's attention and holds its cache, the MTP
    block last; `head` the output's. `caches` are bytes of each layer's cache, the block's last
    whether it is placed or not. `compute` maps devices (and the CPU) to bytes of compute and output
    buffers. `n_layer` counts trunk layers. `side` is the path of the file that the MTP block lies
    in, when it is not the model's own."""

    devices: tuple[Device, ...]
    host: Host
    contexts: Contexts
    tensors: tuple[Placed, ...]
    layers: tuple[str, ...]
    head: str
    caches: tuple[int, ...]
    compute: Mapping[str, int]
    n_layer: int
    side: str | None = None
    drafter: str = "MTP"
    """What the layer behind the trunk's is, for people."""

    def layer_of(self, tensor: Placed) -> int | None:
        """The layer that a tensor belongs to: all of a side file but its embedding to the last."""
        if self.side is not None and tensor.file == self.side:
            return None if tensor.name == "token_embd.weight" else self.n_layer
        return layer_of(tensor.name)

    @property
    def has_block(self) -> bool:
        """Whether an MTP block is placed behind the trunk."""
        return len(self.layers) > self.n_layer

    @property
    def is_on_cpu(self) -> bool:
        """Whether everything lies with the CPU."""
        return all(t.device == CPU for t in self.tensors)

    @property
    def copies_experts(self) -> bool:
        """Whether large batches copy the CPU's experts to a device."""
        routed = (t for t in self.tensors if t.device == CPU and is_routed(t.name))
        able = any(device.copies_experts for device in self.devices)
        return self.contexts.op_offload and able and any(routed)

    def cache_device(self, layer: int) -> str:
        return self.layers[layer] if self.contexts.kv_offload else CPU

    def weights(self, device: str) -> int:
        return sum(t.n_bytes for t in self.tensors if t.device == device)

    def cache(self, device: str) -> int:
        return sum(
            self.caches[i] for i in range(len(self.layers)) if self.cache_device(i) == device
        )

    def used(self, device: str) -> int:
        """Bytes of weights, cache and buffers on a device, or on the CPU."""
        return self.weights(device) + self.cache(device) + self.compute.get(device, 0)

    def over_budget(self) -> list[tuple[Device, int]]:
        """Devices that would have to hold more than their budget, with how much that is."""
        used = [(device, self.used(device.name)) for device in self.devices]
        return [(device, n) for device, n in used if n > device.budget]


def assemble(
    subject: Subject, machine: Machine, places: Mapping[str, str], layers: Sequence[str]
) -> OffloadPlan:
    """The plan in which each tensor lies where `places` says and each layer runs where `layers`
    says, with the buffers that follow. A side file's tensors are named FILE:NAME in `places`."""
    tensors = [
        Placed(t.name, t.n_bytes, places[key_of(t.name, t.file, subject)], t.file)
        for t in subject.tensors
    ]
    head = places.get("output.weight", places.get("output_norm.weight", CPU))
    if subject.is_tied and head != CPU:
        tied = next(t for t in subject.facts.tensors if t.name == "token_embd.weight")
        tensors.append(Placed("output.weight", tied.n_bytes, head, tied.file))
    room = rooms(subject.facts, subject.contexts, subject.side)
    return OffloadPlan(
        devices=machine.devices,
        host=machine.host,
        contexts=subject.contexts,
        tensors=tuple(tensors),
        layers=tuple(layers),
        head=head,
        caches=room.caches,
        compute=_buffers(subject, machine, room, (tensors, layers)),
        n_layer=subject.facts.n_layer,
        side=subject.side.path if subject.side and subject.contexts.drafts else None,
        drafter="DSpark" if dflash.shape(subject.side) else "MTP",
    )


def key_of(name: str, file: str, subject: Subject) -> str:
    """What names a tensor among all that are loaded: a side file repeats head and embedding."""
    in_side = subject.side is not None and file in {t.file for t in subject.side.tensors}
    return f"{file}:{name}" if in_side else name


def keys_of(part: ModelPart, subject: Subject) -> list[str]:
    return [key_of(t.name, t.file, subject) for t in part.tensors]


def _buffers(
    subject: Subject,
    machine: Machine,
    room: Rooms,
    placed: tuple[Sequence[Placed], Sequence[str]],
) -> dict[str, int]:
    """Compute and output buffers by device, for what lies there: llama.cpp's worst case."""
    tensors, layers = placed
    n_layer, drafts = subject.facts.n_layer, subject.contexts.drafts
    held = {t.device for t in tensors}
    out: dict[str, int] = {}
    for device in machine.devices:
        if device.name not in held and device.name not in layers:
            continue
        n_bytes = room.full
        if drafts and (layers[-1] == device.name or device.name == _last(machine)):
            n_bytes += room.draft_full
        out[device.name] = n_bytes + machine.reserve.get(device.name, 0)
    first = next((d for d in machine.devices if d.name in out), None)
    if first and first.copies_experts and subject.contexts.op_offload:
        out[first.name] += max(
            (t.n_bytes for t in tensors if t.device == CPU and is_routed(t.name)), default=0
        )
    routed = any(t.device == CPU and is_routed(t.name) for t in tensors)
    trunk = room.full if CPU in layers[:n_layer] else room.experts if routed else room.rest
    block = room.draft_full if drafts and layers[-1] == CPU else room.draft_experts
    out[CPU] = trunk + (block if drafts else 0) + room.outputs
    return out


def _last(machine: Machine) -> str:
    return machine.devices[-1].name if machine.devices else CPU
