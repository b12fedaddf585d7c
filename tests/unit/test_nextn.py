"""MTP blocks of other architectures: drafted with where llama.cpp can, else told why not."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gguf_mtp.gguf import model_facts
from gguf_mtp.gguf.arch import recurrent
from gguf_mtp.gguf.cache_layout import WITH_BLOCK
from gguf_mtp.gguf.header import Header
from gguf_mtp.gguf.hparams import Hparams
from gguf_mtp.loading.loader import LoadOptions, load
from gguf_mtp.params import SamplingParams
from gguf_mtp.types import TensorInfo
from tests.support.gguf_files import Model, bent
from tests.support.recurrent_models import ARCHITECTURES, N_LAYER

N_EMBD, N_HEAD, D_HEAD, N_EXPERT, N_FF = 32, 2, 16, 4, 20


def glm4moe() -> Model:
    """GLM-4.5's layout (llama.cpp's `glm4moe`): two layers and one MTP block."""
    model = Model()
    model.arch = "glm4moe"
    for key in [k for k in model.hyper if "lora" in k or "_mla" in k or "group" in k]:
        del model.hyper[key]
    model.hyper |= {
        "attention.head_count_kv": 1,
        "attention.key_length": D_HEAD,
        "attention.value_length": D_HEAD,
    }
    shapes: dict[str, tuple[int, ...]] = {
        n: s for n, s in model.shapes.items() if not n.startswith("blk.")
    }
    for i in range(3):
        block: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (N_EMBD,),
            "attn_q.weight": (N_EMBD, N_HEAD * D_HEAD),
            "attn_k.weight": (N_EMBD, D_HEAD),
            "attn_v.weight": (N_EMBD, D_HEAD),
            "attn_output.weight": (N_HEAD * D_HEAD, N_EMBD),
            "post_attention_norm.weight": (N_EMBD,),
        }
        if i == 0:
            block |= {"ffn_gate.weight": (N_EMBD, 64), "ffn_up.weight": (N_EMBD, 64)}
            block |= {"ffn_down.weight": (64, N_EMBD)}
        else:
            block |= {"ffn_gate_inp.weight": (N_EMBD, N_EXPERT), "exp_probs_b.bias": (N_EXPERT,)}
            for part in ("gate", "up"):
                block[f"ffn_{part}_exps.weight"] = (N_EMBD, N_FF, N_EXPERT)
                block[f"ffn_{part}_shexp.weight"] = (N_EMBD, N_FF)
            block["ffn_down_exps.weight"] = (N_FF, N_EMBD, N_EXPERT)
            block["ffn_down_shexp.weight"] = (N_FF, N_EMBD)
        if i == 2:
            block["nextn.eh_proj.weight"] = (2 * N_EMBD, N_EMBD)
            for norm in ("enorm", "hnorm", "shared_head_norm"):
                block[f"nextn.{norm}.weight"] = (N_EMBD,)
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    model.shapes = shapes
    return model


def with_weights(path: Path) -> Path:
    """Random weights: what such a block drafts is nearly never right, and must not show."""
    rng = np.random.default_rng(3)
    facts = model_facts.read(path)
    with path.open("r+b") as file:
        for tensor in facts.tensors:
            n = tensor.n_bytes // 4
            values = rng.standard_normal(n, np.float32) / np.float32(tensor.shape[0] ** 0.5)
            if "norm" in tensor.name:
                values = np.ones(n, np.float32)
            file.seek(tensor.offset)
            assert values.nbytes == tensor.n_bytes
            file.write((2 * values).tobytes())
    return path


@pytest.mark.native
@pytest.mark.parametrize("depth", [1, 3])
def test_glm_4_5_drafts_without_changing_the_text(tmp_path: Path, depth: int) -> None:
    path = with_weights(glm4moe().write(tmp_path / "glm.gguf"))
    facts = model_facts.read(path)
    assert (facts.architecture, facts.can_draft, facts.n_layer) == ("glm4moe", True, 2)
    texts, drafted = [], 0
    for n in (0, depth):
        options = LoadOptions(n_ctx=256, draft_min=n, draft_max=n, strict=True)
        with load(path, options) as session:
            answer: list[int] = []
            prompt = [5, 6, 7, 8, 9]
            for chunk in session.engine.generate([prompt], SamplingParams(temperature=0), 60):
                answer += chunk.tokens
            assert chunk.stats is not None
            texts.append(answer)
            drafted += chunk.stats.drafted
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 3
    assert drafted > 10


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: m.shapes.pop("blk.2.nextn.enorm.weight"), "nextn.enorm.weight is missing"),
        (lambda m: m.shapes.pop("blk.2.ffn_gate_inp.weight"), "blk.2 must have experts"),
        (lambda m: m.hyper.update({"nextn_predict_layers": 2}), "2 MTP blocks"),
    ],
)  # fmt: skip
def test_a_block_that_would_abort_does_not_draft(
    tmp_path: Path, change: Callable[[Model], object], why: str
) -> None:
    model = glm4moe()
    change(model)
    facts = model_facts.read(model.write(tmp_path / "m.gguf"))
    assert not facts.can_draft
    assert why in facts.reason


@pytest.mark.parametrize(
    ("arch", "why"),
    [
        ("qwen3next", "recurrent layers, and their cache cannot drop"),
        ("glm5-next", "recurrent layers, and rewinding their state has not been tested"),
        ("step35", "sliding-window cache cannot always"),
        ("llama", "no MTP graph"),
    ],
)  # fmt: skip
def test_others_are_told_why(tmp_path: Path, arch: str, why: str) -> None:
    def change(model: Model) -> None:
        model.arch = arch

    facts = model_facts.read(bent(tmp_path / "m.gguf", change))
    assert not facts.can_draft
    assert f"MTP block of a {arch} model is not supported" in facts.reason
    assert why in facts.reason


@pytest.mark.parametrize("arch", WITH_BLOCK)
def test_a_sound_recurrent_header_is_taken(arch: str) -> None:
    assert bad(arch, {}) is None


@pytest.mark.parametrize(
    ("arch", "changes", "why"),
    [
        ("qwen35", {"attention.key_length": 16}, "16 key and 32 value dimensions"),
        ("qwen35", {"ssm.group_count": 3}, "64 values into 4 heads of state size 16 and 3 groups"),
        ("qwen35", {"ssm.inner_size": 128}, "128 values into 4 heads"),
        ("qwen35", {"ssm.group_count": 0}, "and 0 groups"),
        ("qwen35moe", {"expert_count": 0}, "it has no experts"),
        ("qwen35moe", {"rope.dimension_count": 0}, "cannot rotate 0 of the 32"),
        ("qwen35moe", {"rope.dimension_count": 34}, "cannot rotate 34 of the 32"),
        ("qwen35", {"rope.dimension_sections": [0, 0, 0, 4]}, r"sections are \[0, 0, 0, 4\]"),
        ("qwen35", {"rope.dimension_sections": [16, 16, 1, 0]}, "more than the 32 of a head"),
        ("qwen35", {"rope.dimension_sections": 4}, "sections are 4"),
        ("qwen35", {"blk.1.attn_gate.weight": None}, "blk.1.attn_gate.weight is missing"),
        ("qwen35moe", {"blk.0.attn_qkv.weight": None}, "blk.0.attn_qkv.weight is missing"),
        ("nemotron_h_moe", {"ssm.inner_size": 66}, "66 values into 4 heads"),
        ("bailingmoe3", {"kda.gate_lower_bound": 0.0}, "no bounded gate"),
        ("bailingmoe3", {"kda.safe_gate": False}, "no bounded gate"),
        ("bailingmoe3", {"attention.key_length": 64}, "keys of 64 values, .* writes 32"),
        ("bailingmoe3", {"kda.gate_lower_bound": math.nan}, "no bounded gate"),
        ("bailingmoe3", {"expert_gating_func": 0}, "gating function is 0"),
        ("bailingmoe3", {"kda.head_dim": 0}, "kda.head_dim is 0"),
    ],
)
def test_what_would_abort_is_refused(arch: str, changes: dict[str, object], why: str) -> None:
    """From GGML_ASSERTs in the loaders and graphs."""
    found = bad(arch, changes)
    assert found is not None
    assert re.search(why, found)


def bad(arch: str, changes: dict[str, object]) -> str | None:
    """What is wrong with a header so changed; of a tensor's name that is None, without it."""
    hyper, layer = ARCHITECTURES[arch]
    kv = {f"{arch}.{key}": value for key, value in {**hyper, **changes}.items()}
    names = [f"blk.{i}.{name}" for i in range(N_LAYER) for name in layer(i)]
    tensors = tuple(
        TensorInfo(name, (1,), "F32", 4, 0, "m.gguf") for name in names if name not in changes
    )
    return recurrent.why_not_run(Header(kv, tensors), Hparams(kv, arch, "m.gguf"))
