"""Models to place, machines to place them on, and llama.cpp's rules for it, read in its source."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from gguf_mtp.gguf.bytes_per_token import layer_of
from gguf_mtp.offload import CPU, Contexts, Device, Machine, OffloadPlan, Subject
from gguf_mtp.offload.directives import LoadParams
from gguf_mtp.types import ModelFacts, TensorInfo

MIB = 1 << 20


def facts_of(
    n_layer: int = 3,
    expert: int = 16 * MIB,
    attention: int = 4 * MIB,
    tied: bool = False,
    n_expert: int = 16,
    n_used: int = 4,
) -> ModelFacts:
    """A model of MLA layers and an MTP block, with a cache row of 64 values."""

    def tensor(name: str, n_bytes: int) -> TensorInfo:
        return TensorInfo(name, (1,), "Q8_0", n_bytes, 0, "model.gguf")

    tensors = [tensor("token_embd.weight", 6 * MIB), tensor("output_norm.weight", 100)]
    tensors += [] if tied else [tensor("output.weight", 6 * MIB)]
    for i in range(n_layer + 1):
        tensors.append(tensor(f"blk.{i}.attn_output.weight", attention))
        if i == 0 and n_layer > 1:
            tensors.append(tensor("blk.0.ffn_up.weight", 3 * MIB))
            continue
        tensors.append(tensor(f"blk.{i}.ffn_up_shexp.weight", MIB))
        tensors += [tensor(f"blk.{i}.ffn_{p}_exps.weight", expert // 2) for p in ("up", "down")]
    tensors.append(tensor(f"blk.{n_layer}.nextn.eh_proj.weight", MIB))
    kv = {
        "attention.head_count": 2,
        "attention.head_count_kv": 1,
        "attention.key_length": 64,
        "attention.value_length": 48,
        "attention.key_length_mla": 24,
        "attention.value_length_mla": 16,
        "feed_forward_length": 128,
        "expert_feed_forward_length": 64,
    }
    return ModelFacts(
        path="model.gguf",
        architecture="deepseek2",
        name="placed",
        n_layer=n_layer,
        n_mtp=1,
        n_embd=64,
        n_vocab=300,
        context_length=65536,
        n_expert=n_expert,
        n_expert_used=n_used,
        can_draft=True,
        reason="",
        tensors=tuple(tensors),
        kv={f"deepseek2.{key}": value for key, value in kv.items()},
    )


def subject(
    n_layer: int = 3,
    drafts: bool = True,
    expert: int = 16 * MIB,
    attention: int = 4 * MIB,
    tied: bool = False,
    kv_offload: bool = True,
    n_cells: int = 4096,
) -> Subject:
    contexts = Contexts(n_cells, n_draft_batch=64 if drafts else 0, kv_offload=kv_offload)
    return Subject(facts_of(n_layer, expert, attention, tied), contexts)


def machine(free: Sequence[int], n_remote: int = 0) -> Machine:
    """Devices GPU0, GPU1, ... that keep 5 MiB back and copy no experts; the first `n_remote` are
    other machines'."""
    return Machine(
        tuple(
            Device(f"GPU{i}", n, margin=5 * MIB, copies_experts=False, is_remote=i < n_remote)
            for i, n in enumerate(free)
        )
    )


sizes = st.integers(0, 600).map(lambda n: n * MIB)
machines = st.builds(machine, st.lists(sizes, max_size=4), st.integers(0, 4))
models = st.builds(
    subject,
    n_layer=st.integers(1, 9),
    drafts=st.booleans(),
    expert=st.integers(1, 60).map(lambda n: n * MIB),
    attention=st.integers(1, 20).map(lambda n: n * MIB),
    tied=st.booleans(),
    kv_offload=st.booleans(),
    n_cells=st.sampled_from([256, 65536, 65536]),
)


def llama_cpp_places(
    told: LoadParams, plan: OffloadPlan, n_blocks: int
) -> tuple[dict[str, str], list[str], str]:
    """Where llama.cpp would put each tensor, layer and the output: `load_tensors`
    (llama-model.cpp) and `create_tensor` (llama-model-loader.cpp), in float32 as there."""
    splits = np.cumsum(np.array(told.split, np.float32), dtype=np.float32)
    if len(splits):
        splits = splits / splits[-1]
    n_gpu = n_blocks + 1 if told.n_gpu_layers < 0 else told.n_gpu_layers
    first, active = max(n_blocks + 1 - n_gpu, 0), min(n_gpu, n_blocks + 1) if told.devices else 0

    def device_of(layer: int) -> str:
        if layer < first or layer - first >= active:
            return CPU
        at = np.float32(layer - first) / np.float32(active)
        return told.devices[int(np.searchsorted(splits, at, side="right"))]

    layers, head = [device_of(i) for i in range(n_blocks)], device_of(n_blocks)
    places = {}
    for tensor in plan.tensors:
        layer = layer_of(tensor.name)
        is_output = tensor.name.startswith("output")
        place = layers[layer] if layer is not None else head if is_output else CPU
        for pattern, device in told.overrides:
            if re.search(pattern, tensor.name):
                place = device
                break
        places[tensor.name] = place
    return places, layers, head
