"""The plan that nobody has to write: greedy by worth, never over a device's budget.

Pure: header facts, sizes of contexts and devices in, an `OffloadPlan` out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from gguf_mtp.gguf.bytes_per_token import is_routed
from gguf_mtp.offload.buffers import Rooms, rooms
from gguf_mtp.offload.machine import CPU, Device
from gguf_mtp.offload.parts import ModelPart, Subject
from gguf_mtp.offload.plan import Machine, OffloadPlan, assemble, keys_of

__all__ = ["fit", "usable"]


def fit(subject: Subject, machine: Machine) -> OffloadPlan:
    """The best placement on `machine`. Raises `RequestError` for a cache type that does not fit.

    Copying experts to the device for large batches (op-offload) takes room for the largest expert
    tensor: where that would push attention or the head off the devices, it is given up, and
    `contexts.op_offload` of the plan is False. Devices too small for a decode's buffers get
    nothing. They stay in the plan, empty.
    """
    plan = _fit(subject, machine)
    contexts = subject.contexts
    if contexts.op_offload and not contexts.insists and _read_by_cpu(plan):
        lean = replace(subject, contexts=replace(contexts, op_offload=False))
        other = _fit(lean, machine)
        if _read_by_cpu(other) < _read_by_cpu(plan):
            return other
    return plan


def _read_by_cpu(plan: OffloadPlan) -> int:
    """Bytes with the CPU that every token reads."""
    return plan.cache(CPU) + sum(
        t.n_bytes
        for t in plan.tensors
        if t.device == CPU and not is_routed(t.name) and t.name != "token_embd.weight"
    )


def _fit(subject: Subject, machine: Machine) -> OffloadPlan:
    room = rooms(subject.facts, subject.contexts, subject.side)
    able = replace(machine, devices=usable(subject, machine, room))
    free = {d.name: _free(subject, able, i, room) for i, d in enumerate(able.devices)}
    units = subject.parts()
    caches = room.caches if subject.contexts.kv_offload else (0,) * len(room.caches)
    sizes = _PartSizes(units, able.devices, caches)
    owners = _split([u for u in units if u.has_cache], free, sizes)
    filler = _Filler(free, owners, sizes.remote)
    places: dict[str, str] = {}
    for unit in units:
        device = owners.get(unit.layer, CPU) if unit.has_cache else filler.place(unit)
        places |= dict.fromkeys(keys_of(unit, subject), device)
        if unit.kind == "head":
            places["output.weight"] = device  # of a tied one no tensor has the name
    layers = [owners.get(i, CPU) for i in range(subject.n_layers)]
    plan = assemble(subject, able, places, layers)
    return replace(plan, devices=machine.devices)


def usable(subject: Subject, machine: Machine, room: Rooms) -> tuple[Device, ...]:
    """Devices with room for more than a decode's buffers, in order."""
    devices = machine.devices
    while True:
        able = replace(machine, devices=devices)
        left = tuple(d for i, d in enumerate(devices) if _free(subject, able, i, room) > 0)
        if left == devices:
            return devices
        devices = left


def _free(subject: Subject, machine: Machine, index: int, room: Rooms) -> int:
    """What is left of a device's budget when its buffers are set aside, at most. The MTP context
    computes on the last device; only the first copies experts over for large batches."""
    device = machine.devices[index]
    n_bytes = room.full + machine.reserve.get(device.name, 0)
    if index == len(machine.devices) - 1:
        n_bytes += room.draft_full
    if index == 0 and device.copies_experts and subject.contexts.op_offload:
        n_bytes += max((t.n_bytes for t in subject.tensors if is_routed(t.name)), default=0)
    return device.budget - n_bytes


class _PartSizes:
    """What a layer's attention takes on a device, with its cache. A device of another machine takes
    whole layers, dense part and routed experts too: a layer cut between two machines would send its
    graphs and rows back and forth for every token."""

    def __init__(
        self, units: Sequence[ModelPart], devices: Sequence[Device], caches: Sequence[int]
    ) -> None:
        self.remote = {d.name for d in devices if d.is_remote}
        self._are_all_remote = len(self.remote) == len(devices)
        self._caches = caches
        self._rest: dict[int, int] = {}
        for unit in units:
            if not unit.has_cache and unit.layer >= 0:
                self._rest[unit.layer] = self._rest.get(unit.layer, 0) + unit.n_bytes

    def of(self, unit: ModelPart, device: str) -> int:
        return self._of(unit, device in self.remote)

    def everything(self, units: Sequence[ModelPart]) -> int:
        return sum(self._of(unit, self._are_all_remote) for unit in units)

    def _of(self, unit: ModelPart, whole: bool) -> int:
        cache = self._caches[unit.layer]
        return unit.n_bytes + cache + (self._rest.get(unit.layer, 0) if whole else 0)


def _split(units: Sequence[ModelPart], free: dict[str, int], sizes: _PartSizes) -> dict[int, str]:
    """The device of each layer's attention with its cache, taken from `free`.

    Contiguous, the last device holding the last layers, as llama.cpp lays layers out; each device's
    part follows its memory, so that experts can lie beside their attention. What fits on none stays
    with the CPU: the first layers.
    """
    shared = _walk(units, free, sizes, balanced=True)
    if len(shared) < len(units):
        packed = _walk(units, free, sizes, balanced=False)
        shared = packed if len(packed) > len(shared) else shared
    for unit in units:
        if unit.layer in shared:
            free[shared[unit.layer]] -= sizes.of(unit, shared[unit.layer])
    return shared


def _walk(
    units: Sequence[ModelPart], free: Mapping[str, int], sizes: _PartSizes, balanced: bool
) -> dict[int, str]:
    owners: dict[int, str] = {}
    total, everything = sum(free.values()), sizes.everything(units)
    left, devices = list(units), list(free)
    while devices and left:
        name = devices.pop()
        room = free[name]
        is_bounded = balanced and bool(devices)
        taken = 0
        if left[0].kind == "block" and sizes.of(left[0], name) > room:
            left.pop(0)  # it may lie apart from the trunk: with the CPU
        while left and taken + sizes.of(left[0], name) <= room:
            if is_bounded and taken >= everything * room / total:
                break
            taken += sizes.of(left[0], name)
            owners[left.pop(0).layer] = name
    return owners


class _Filler:
    """Places parts without a cache in what is free."""

    def __init__(
        self, free: dict[str, int], owners: Mapping[int, str], remote: Collection[str]
    ) -> None:
        self._free, self._owners, self._remote = free, owners, remote

    def place(self, unit: ModelPart) -> str:
        """Beside its layer's attention if there is room, else on any device that has some. The head
        and the MTP block go where the MTP context has its buffers, or stay with the CPU."""
        owner = self._owners.get(unit.layer)
        if owner is not None and owner in self._remote:
            return owner  # its room was taken with the layer's attention
        last = list(self._free)[-1:]
        own = [owner] if owner else []
        wanted: Sequence[str] = ()
        if unit.kind == "head":
            wanted = last
        elif unit.kind == "block experts":
            wanted = own
        elif unit.kind in ("dense", "experts"):
            wanted = [*own, *(d for d in reversed(self._free) if d not in self._remote)]
        for name in wanted:
            if unit.n_bytes <= self._free[name]:
                self._free[name] -= unit.n_bytes
                return name
        return CPU
