"""What a plan would really take, asked of llama.cpp without allocating: `python -m ... < request`.

Runs in a process of its own, because what goes wrong inside llama.cpp ends the process, and because
a worker of another machine serves one connection at a time. Request and answer are one JSON object
each; see `placement`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from gguf_mtp.llama.buffer_breakdown import BufferBreakdown
from gguf_mtp.llama.context_options import ContextOptions
from gguf_mtp.llama.model import Model, ModelOptions
from gguf_mtp.llama.rpc import connect
from gguf_mtp.offload.directives import LoadParams

__all__ = ["answer"]


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """`rpc`: workers; `model` and `side` (or null): `path`, `load_params`, `load_mtp`; `target` and
    `block` (or null): options of contexts; `block_size` that of stages that draft blocks, or 0. The
    answer maps devices to bytes of weights, cache and
    compute buffers of all of them together."""
    for endpoint in request["rpc"]:
        connect(endpoint)
    total: dict[str, list[int]] = {}
    with _model(request["model"]) as model:
        target = model.context(_options(request["target"]))
        _add(total, target.memory(), with_model=True)
        if request["block"] is None:
            return total
        options = _options(request["block"])
        if size := request["block_size"]:
            with _model(request["side"]) as side:
                block = side.block_context(options, target, size)
                _add(total, block.memory(), with_model=True)
            return total
        target.close()
        if request["side"] is None:
            _add(total, model.context(options).memory(), with_model=False)
            return total
        with _model(request["side"]) as side:
            _add(total, side.context(options).memory(), with_model=True)
    return total


def _options(wanted: dict[str, Any]) -> ContextOptions:
    return ContextOptions(**{**wanted, "layers": tuple(wanted["layers"])})


def _model(wanted: dict[str, Any]) -> Model:
    d = wanted["load_params"]
    load_params = LoadParams(
        tuple(d[0]), d[1], tuple(d[2]), tuple((pattern, device) for pattern, device in d[3])
    )
    # The default way to load asserts that memory is allocated.
    options = ModelOptions(
        load_mtp=wanted["load_mtp"], load_params=load_params, load_mode="none", no_alloc=True
    )
    return Model(wanted["path"], options)


def _add(total: dict[str, list[int]], found: dict[str, BufferBreakdown], with_model: bool) -> None:
    for device, memory in found.items():
        sums = total.setdefault(device, [0, 0, 0])
        sums[0] += memory.model if with_model else 0
        sums[1] += memory.context
        sums[2] += memory.compute


if __name__ == "__main__":
    print(json.dumps(answer(json.load(sys.stdin))))
