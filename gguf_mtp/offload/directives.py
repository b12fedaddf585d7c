"""A plan in llama.cpp's words: devices, layers offloaded, shares of layers, patterns for tensors.

llama.cpp offloads layers from the last one on, counts the output as one more, and cuts the
offloaded ones into runs by shares of devices: shares that are numbers of layers cut exactly there.
A layer's cache and attention follow it; a tensor goes elsewhere by a pattern, and every layer gets
one that is anchored to its number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from gguf_mtp.gguf.bytes_per_token import is_routed, layer_of
from gguf_mtp.offload.machine import CPU
from gguf_mtp.offload.plan import OffloadPlan, Placed

__all__ = ["LoadParams", "load_params", "side_load_params"]


class LoadParams(NamedTuple):
    """`split[i]` layers go to `devices[i]`; `overrides` are (ECMAScript pattern, device), the first
    that matches a tensor's name wins."""

    devices: tuple[str, ...]
    n_gpu_layers: int
    split: tuple[int, ...]
    overrides: tuple[tuple[str, str], ...]

    def renamed(self, names: Mapping[str, str]) -> LoadParams:
        """The same for a process in which devices have other names."""
        return self._replace(
            devices=tuple(names.get(d, d) for d in self.devices),
            overrides=tuple((pattern, names.get(d, d)) for pattern, d in self.overrides),
        )


def load_params(plan: OffloadPlan, n_blocks: int) -> LoadParams:
    """For the model's own file, whose header counts `n_blocks` layers, an MTP block included
    whether it is loaded or not."""
    own = [t for t in plan.tensors if t.file != plan.side]
    layers = list(plan.layers[: plan.n_layer] if plan.side else plan.layers)
    used = _used(plan, own, layers)
    if not used:
        return LoadParams((), 0, (), ())
    first = next((i for i, device in enumerate(layers) if device != CPU), n_blocks)
    runs = layers[first:]
    # An MTP block apart from the trunk, or not loaded, still counts as a layer of the last device.
    runs = [device if device != CPU else used[-1] for device in runs]
    runs += [used[-1]] * (n_blocks + 1 - first - len(runs))
    split = tuple(runs.count(device) for device in used)
    return LoadParams(used, len(runs), split, _overrides(own, layers, plan.head))


def side_load_params(plan: OffloadPlan) -> LoadParams:
    """For the side file: its block lies where the plan has the MTP layer."""
    own = [t for t in plan.tensors if t.file == plan.side]
    block = plan.layers[-1]
    used = _used(plan, own, [block])
    if not used:
        return LoadParams((), 0, (), ())
    layers = [*[block] * plan.n_layer, block]
    return LoadParams(
        used, -1, tuple(int(d == used[-1]) for d in used), _overrides(own, layers, block)
    )


def _used(plan: OffloadPlan, tensors: list[Placed], layers: list[str]) -> tuple[str, ...]:
    held = {t.device for t in tensors} | set(layers)
    return tuple(d.name for d in plan.devices if d.name in held)


def _overrides(tensors: list[Placed], layers: list[str], head: str) -> tuple[tuple[str, str], ...]:
    by_layer: dict[int, list[Placed]] = {}
    for tensor in tensors:
        layer = layer_of(tensor.name)
        if layer is not None:
            by_layer.setdefault(layer, []).append(tensor)
    out: list[tuple[str, str]] = [("^output", head)]
    if head == CPU:
        out.append(("^token_embd", CPU))  # a tied output is made from it
    for layer, own in sorted(by_layer.items()):
        default = layers[layer]
        out += _exceptions(layer, own, default)
        out.append((rf"^blk\.{layer}\.", default))
    return tuple(out)


def _exceptions(layer: int, tensors: list[Placed], default: str) -> list[tuple[str, str]]:
    """Patterns for the tensors of a layer that lie apart from its attention."""
    apart = [t for t in tensors if t.device != default]
    routed = [t for t in tensors if is_routed(t.name)]
    if apart == routed and len({t.device for t in apart}) == 1:
        return [(rf"^blk\.{layer}\..*_exps\.", apart[0].device)]
    return [(f"^{re.escape(t.name)}$", t.device) for t in apart]
