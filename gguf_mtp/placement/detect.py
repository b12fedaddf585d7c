"""Which devices there are to plan for: this machine's, and those that workers lend."""

from __future__ import annotations

from collections.abc import Sequence

from gguf_mtp import llama
from gguf_mtp.errors import RequestError
from gguf_mtp.offload.machine import Device, names
from gguf_mtp.offload.options import PlacementOptions
from gguf_mtp.placement import rpc_probe

__all__ = ["detect_devices", "remote_devices"]


def remote_devices(workers: Sequence[str]) -> list[tuple[str, int]]:
    """Names and free memory of the workers' devices. ggml numbers them through a process's life:
    those of a worker that was used before keep their names, others come after all there are."""
    taken = sum(llama.is_remote(name) for name in llama.accelerators())
    found: list[tuple[str, int]] = []
    for endpoint in workers:
        memory, names_ = rpc_probe.probe_worker(endpoint).memory, llama.lent(endpoint)
        if not names_:
            names_ = [f"RPC{taken + i}" for i in range(len(memory))]
            taken += len(memory)
        found += [(name, free) for name, (free, _) in zip(names_, memory, strict=False)]
    return found


def detect_devices(options: PlacementOptions) -> tuple[Device, ...]:
    """The devices to use, in order. Workers are looked at by socket: a connection of ggml's own
    would keep the check's out."""
    lent = [
        Device(name, free, margin=options.margin, copies_experts=False, is_remote=True)
        for name, free in remote_devices(options.rpc)
    ]
    found = (*lent, *llama.devices(options.margin))
    if options.main_gpu is not None:
        if not 0 <= options.main_gpu < len(found):
            raise RequestError(
                f"--main-gpu {options.main_gpu}: there are {len(found)} devices"
                + (f" ({names(found)})" if found else "")
            )
        return (found[options.main_gpu],)
    if not options.devices or options.devices == ("none",):
        return found if not options.devices else ()
    by_name = {d.name: d for d in found}
    for name in options.devices:
        if name not in by_name:
            raise RequestError(
                f"--device {name} does not exist; available: {names(found) or 'only the CPU'}"
            )
    return tuple(by_name[name] for name in options.devices)
