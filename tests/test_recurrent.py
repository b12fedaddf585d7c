"""A model with recurrent layers: small, random, run plain; its states cannot be cut or shared."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from gguf_files import Model as Tiny

from gguf_mtp.errors import CannotRewind
from gguf_mtp.llama import ContextOptions, Model
from gguf_mtp.loader import LoadOptions, load
from gguf_mtp.model_file import metadata
from gguf_mtp.params import SamplingParams
from gguf_mtp.types import Rows

pytestmark = pytest.mark.native

D, D_FF, D_HEAD, N_HEAD, N_VOCAB = 64, 96, 32, 2, 300
D_STATE, N_GROUP, N_RANK = 16, 2, 4
COUNTS = {
    "block_count": 5, "nextn_predict_layers": 1, "context_length": 512, "embedding_length": D,
    "feed_forward_length": D_FF, "attention.head_count": N_HEAD, "attention.head_count_kv": 1,
    "attention.key_length": D_HEAD, "attention.value_length": D_HEAD, "rope.dimension_count": 16,
    "ssm.conv_kernel": 4, "ssm.inner_size": D_STATE * N_RANK, "ssm.state_size": D_STATE,
    "ssm.time_step_rank": N_RANK, "ssm.group_count": N_GROUP, "full_attention_interval": 4,
}  # fmt: skip


def shapes() -> dict[str, tuple[int, ...]]:
    """Three recurrent layers, one of attention, and the MTP block, by names in ggml's order."""
    root = {"token_embd.weight": (N_VOCAB, D), "output.weight": (N_VOCAB, D)}
    found: dict[str, tuple[int, ...]] = root | {"output_norm.weight": (D,)}
    value, both = D_STATE * N_RANK, D_STATE * (2 * N_GROUP + N_RANK)
    for i in range(5):
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (D,), "post_attention_norm.weight": (D,),
            "ffn_gate.weight": (D_FF, D), "ffn_up.weight": (D_FF, D), "ffn_down.weight": (D, D_FF),
        }  # fmt: skip
        if i < 3:
            layer |= {
                "attn_qkv.weight": (both, D), "attn_gate.weight": (value, D),
                "ssm_conv1d.weight": (both, 4), "ssm_dt.bias": (N_RANK,), "ssm_a": (N_RANK,),
                "ssm_beta.weight": (N_RANK, D), "ssm_alpha.weight": (N_RANK, D),
                "ssm_norm.weight": (D_STATE,), "ssm_out.weight": (D, value),
            }  # fmt: skip
        else:
            layer |= {
                "attn_q.weight": (D_HEAD * N_HEAD * 2, D), "attn_k.weight": (D_HEAD, D),
                "attn_v.weight": (D_HEAD, D), "attn_output.weight": (D, D_HEAD * N_HEAD),
                "attn_q_norm.weight": (D_HEAD,), "attn_k_norm.weight": (D_HEAD,),
            }  # fmt: skip
        if i == 4:
            layer |= {f"nextn.{n}.weight": (D,) for n in ("enorm", "hnorm", "shared_head_norm")}
            layer["nextn.eh_proj.weight"] = (D, 2 * D)
        found |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    return found


@pytest.fixture(scope="module")
def qwen35(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen35") / "model.gguf"
    writer, rng = GGUFWriter(path, "qwen35"), np.random.default_rng(3)
    for key, count in COUNTS.items():
        writer.add_uint32(f"qwen35.{key}", count)
    writer.add_float32("qwen35.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32("qwen35.rope.freq_base", 10000.0)
    writer.add_array("qwen35.rope.dimension_sections", [4, 2, 2, 0])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("deepseek-v3")
    writer.add_token_list(Tiny().tokens)
    writer.add_token_types([1] * N_VOCAB)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(257)
    for name, shape in shapes().items():
        values = rng.standard_normal(shape)
        if name.endswith("ssm_a"):
            values = -np.exp(values)
        else:
            values = 1 + 0.1 * values if "norm" in name else values * 1.5 / np.sqrt(shape[-1])
        writer.add_tensor(name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


BEGINNING = [*range(5, 37)] * 2
PROMPTS = [[*BEGINNING, 40, 41], [*BEGINNING, 50, 51, 52]]


def answers(path: Path, n_seq: int, turns: list[list[list[int]]]) -> list[list[int]]:
    """What the last turn's prompts are answered with, by slot."""
    found: dict[int, list[int]] = {}
    with load(path, LoadOptions(n_ctx=256, n_seq=n_seq, strict=True)) as session:
        for prompts in turns:
            found = {}
            for chunk in session.engine.generate(prompts, SamplingParams(temperature=0), 30):
                found.setdefault(chunk.seq, []).extend(chunk.tokens)
    return list(found.values())


def test_it_runs_and_says_why_it_does_not_draft(qwen35: Path) -> None:
    facts = metadata.read(qwen35)
    assert not facts.can_draft
    assert "recurrent" in facts.reason
    assert len(answers(qwen35, 1, [PROMPTS[:1]])[0]) == 30


def test_a_shared_beginning_is_not_copied_out_of_a_state(qwen35: Path) -> None:
    """The first answer stays in its slot; then both prompts begin as it does."""
    alone = [answers(qwen35, 1, [[prompt]])[0] for prompt in PROMPTS]
    assert alone[0] != alone[1]
    assert sorted(answers(qwen35, 2, [PROMPTS[:1], PROMPTS])) == sorted(alone)


def test_a_state_is_copied_whole_or_not_at_all(qwen35: Path) -> None:
    with Model(str(qwen35)) as model:
        context = model.context(ContextOptions(256, 2, 8, 8, n_threads=1, strict=True))
        context.decode([Rows(0, 0, [5, 6, 7, 8], 1)])
        with pytest.raises(CannotRewind, match="state of this model after 2 rows is not kept"):
            context.copy(0, 1, 2)
        assert context.n_past(1) == 0
        context.copy(0, 1, 4)
        theirs = context.decode([Rows(0, 4, [9], 1)]).outputs[0].logits.copy()
        ours = context.decode([Rows(1, 4, [9], 1)]).outputs[0].logits
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
