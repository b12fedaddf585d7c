"""A recurrent model of real size, its weights a hole: plans against llama.cpp's own account."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter

from gguf_mtp.gguf import model_facts
from gguf_mtp.gguf.cache_layout import WITH_BLOCK
from gguf_mtp.loading.loader import LoadOptions, load
from gguf_mtp.offload import CPU, Device, Machine, Subject
from gguf_mtp.offload.manual import ByHand, manual
from gguf_mtp.offload.options import PlacementOptions
from gguf_mtp.params import SamplingParams
from gguf_mtp.placement import context_size
from gguf_mtp.placement.checked_plan import _ask, plan_placement
from gguf_mtp.placement.detect import remote_devices
from tests.support import recurrent_models
from tests.support.gguf_files import Model as Tiny
from tests.support.worlds import workers

pytestmark = pytest.mark.native

D, HEAD, N_HEAD, N_KV, FF, N_EXPERT, N_LAYER = 2048, 256, 16, 2, 512, 256, 40
STATE, RANK, GROUP, CONV = 128, 32, 16, 4
INNER, WIDTH = STATE * RANK, STATE * (RANK + 2 * GROUP)
HYPER: dict[str, Any] = {
    "block_count": N_LAYER + 1, "nextn_predict_layers": 1, "context_length": 262144,
    "embedding_length": D, "feed_forward_length": FF, "attention.head_count": N_HEAD,
    "attention.head_count_kv": N_KV, "attention.key_length": HEAD, "attention.value_length": HEAD,
    "rope.dimension_count": 64, "ssm.conv_kernel": CONV, "ssm.inner_size": INNER,
    "ssm.state_size": STATE, "ssm.time_step_rank": RANK, "ssm.group_count": GROUP,
    "full_attention_interval": 4, "expert_count": N_EXPERT, "expert_used_count": 8,
    "expert_feed_forward_length": FF, "expert_shared_feed_forward_length": FF,
}  # fmt: skip
ATTENTION = {
    "attn_q": (2 * HEAD * N_HEAD, D), "attn_k": (HEAD * N_KV, D), "attn_v": (HEAD * N_KV, D),
    "attn_output": (D, HEAD * N_HEAD), "attn_q_norm": (HEAD,), "attn_k_norm": (HEAD,),
}  # fmt: skip
DELTA_NET = {
    "attn_qkv": (WIDTH, D), "attn_gate": (INNER, D), "ssm_conv1d": (WIDTH, CONV),
    "ssm_dt.bias": (RANK,), "ssm_a.": (RANK,), "ssm_beta": (RANK, D), "ssm_alpha": (RANK, D),
    "ssm_norm": (STATE,), "ssm_out": (D, INNER),
}  # fmt: skip
REST = {
    "attn_norm": (D,), "post_attention_norm": (D,), "ffn_gate_inp": (N_EXPERT, D),
    "ffn_gate_exps": (N_EXPERT, FF, D), "ffn_up_exps": (N_EXPERT, FF, D),
    "ffn_down_exps": (N_EXPERT, D, FF), "ffn_gate_shexp": (FF, D), "ffn_up_shexp": (FF, D),
    "ffn_down_shexp": (D, FF), "ffn_gate_inp_shexp": (D,),
}  # fmt: skip
BLOCK = {
    "nextn.eh_proj": (D, 2 * D), "nextn.enorm": (D,), "nextn.hnorm": (D,),
    "nextn.shared_head_norm": (D,),
}  # fmt: skip


def shapes() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (300, D), "output.weight": (300, D), "output_norm.weight": (D,),
    }  # fmt: skip
    for i in range(N_LAYER + 1):
        is_block = i == N_LAYER
        mixer = ATTENTION if is_block or i % 4 == 3 else DELTA_NET
        for name, shape in (REST | mixer | (BLOCK if is_block else {})).items():
            full = name if name.endswith(".bias") else f"{name}.weight"
            found[f"blk.{i}.{full.replace('..weight', '')}"] = shape
    return found


@pytest.fixture(scope="module")
def hollow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """35 B parameters at Q8_0, of which nothing is on the disk."""
    path = tmp_path_factory.mktemp("hollow") / "qwen35moe.gguf"
    writer, end = GGUFWriter(path, "qwen35moe"), 0
    for key, value in HYPER.items():
        writer.add_uint32(f"qwen35moe.{key}", value)
    writer.add_float32("qwen35moe.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32("qwen35moe.rope.freq_base", 1e7)
    writer.add_array("qwen35moe.rope.dimension_sections", [11, 11, 10, 0])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("deepseek-v3")
    writer.add_token_list(Tiny().tokens)
    writer.add_token_types([1] * 300)
    writer.add_token_merges(["a b"])
    for name, shape in shapes().items():
        is_small = len(shape) == 1 or shape[-1] % 32 or ("ssm_" in name and "out" not in name)
        kind = GGMLQuantizationType.F32 if is_small else GGMLQuantizationType.Q8_0
        raw = shape if is_small else (*shape[:-1], shape[-1] // 32 * 34)
        n_bytes = int(np.prod(raw)) * (4 if is_small else 1)
        dtype = np.dtype(np.float32 if is_small else np.uint8)
        writer.add_tensor_info(name, raw, dtype, n_bytes, raw_dtype=kind)
        end += -(-n_bytes // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        file.truncate(-(-path.stat().st_size // 32) * 32 + end)
    return path


@pytest.mark.parametrize(
    ("n_seq", "n_draft", "n_ctx"), [(1, 0, 8192), (1, 8, 8192), (4, 8, 8192), (2, 3, 32768)]
)
def test_qwen_of_35_b_is_reckoned(hollow: Path, n_seq: int, n_draft: int, n_ctx: int) -> None:
    facts = model_facts.read(hollow)
    assert "30 of 40 layers are recurrent" in facts.reason
    assert "62.81 MiB" in facts.reason
    sizes = context_size.contexts(n_ctx, n_seq, n_draft, n_draft > 0)
    subject = Subject(facts, context_size.with_states(sizes, facts, n_draft))
    plan = plan_placement(subject, PlacementOptions(allow_thrash=True)).plan
    found = _ask(plan, replace(subject, contexts=plan.contexts), [])
    assert found is not None
    weights, cache, buffers = found[CPU]
    assert plan.weights(CPU) == pytest.approx(weights, rel=1e-4)
    assert plan.cache(CPU) == cache
    assert buffers <= plan.compute[CPU] < 1.45 * buffers


@pytest.mark.parametrize(("n_batch", "n_draft", "expected"), [(1, 8, 10), (64, 8, 64), (1, 0, 2)])
def test_a_batch_has_room_for_a_row_more_than_states(
    hollow: Path, n_batch: int, n_draft: int, expected: int
) -> None:
    """`GGML_ASSERT(n_ubatch > n_keep_tail)` in llama.cpp's split_equal."""
    sizes = context_size.contexts(512, 1, n_draft, n_batch=n_batch)
    found = context_size.with_states(sizes, model_facts.read(hollow), n_draft)
    assert (found.n_rewind, found.n_batch) == (n_draft, expected)


@pytest.mark.parametrize("hand", [ByHand(-1, cpu_moe=-1), ByHand(12, cpu_moe=-1)])
def test_states_lie_where_their_layers_do(hollow: Path, hand: ByHand) -> None:
    facts = model_facts.read(hollow)
    sizes = context_size.with_states(context_size.contexts(8192, 2, 4, True), facts, 4)
    subject = Subject(facts, sizes)
    with workers(64 << 20) as [worker]:
        [(remote_name, _)] = remote_devices(
            [worker.endpoint]
        )  # this process may know other workers
        device = Device(remote_name, 10**13, copies_experts=False)
        plan = manual(subject, Machine((device,)), hand)
        found = _ask(plan, subject, [worker.endpoint])
    assert found is not None
    for name in (remote_name, CPU):
        assert plan.weights(name) == pytest.approx(found[name][0], rel=1e-3)
        assert plan.cache(name) == found[name][1]
    theirs = found[remote_name][2]
    assert theirs <= plan.compute[remote_name] < 1.6 * theirs


@pytest.mark.parametrize("arch", WITH_BLOCK)
def test_states_on_a_device_go_back_there(tmp_path: Path, arch: str) -> None:
    """The repeating prompts are copied from, rightly and wrongly, and the block drafts too."""
    path = recurrent_models.write(tmp_path / "model.gguf", arch)
    prompts = [[*range(5, 25)] * 3, [7, 8, 9] * 9]

    def answers(placement: PlacementOptions, depth: int) -> list[list[int]]:
        options = LoadOptions(
            n_ctx=256, n_seq=2, draft_min=depth, draft_max=depth, strict=True, placement=placement
        )
        found: dict[int, list[int]] = {0: [], 1: []}
        with load(path, options) as session:
            for chunk in session.engine.generate(prompts, SamplingParams(temperature=0), 30):
                found[chunk.seq] += chunk.tokens
            assert (session.engine.totals.drafted > 0) == (depth > 0)
        return list(found.values())

    with workers(64 << 20) as [worker]:
        there = PlacementOptions(rpc=(worker.endpoint,), n_gpu_layers=-1, margin=0)
        assert answers(there, 3) == answers(PlacementOptions(), 0)
