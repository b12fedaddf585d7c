"""Other families than DeepSeek-V3: official names and keys, through llama.cpp, against PyTorch.

The demo's trained weights stand in where a family is V3's layout under other keys: then the text
and the drafts must be V3's own. Elsewhere random weights are compared with transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from gguf_mtp.cli.app import app
from gguf_mtp.converters.convert import ConvertOptions, convert, plan
from gguf_mtp.demo import CHECKPOINT, demo_model
from gguf_mtp.errors import ConversionError, UnsupportedModel
from gguf_mtp.gguf import model_facts
from gguf_mtp.llama import ContextOptions, Model, ModelOptions
from gguf_mtp.types import Rows
from tests.native.test_layouts import Answers, answers
from tests.support.checkpoints import INDEX, Entry, changed_demo, holes, read_all, write
from tests.support.family_checkpoints import (
    GLM,
    LITE,
    V32,
    bf16,
    entries,
    pytorch_logits,
    random_checkpoint,
    rounded,
)
from tests.support.tokenizers_made import kimi_ranks, write_kimi, write_lite
from tests.unit.test_tokenizer import lines

pytestmark = pytest.mark.native

Tensors = dict[str, tuple[Entry, bytes]]


@pytest.fixture(scope="module")
def v3() -> Answers:
    return answers(demo_model(kind="f32"))


# -- DeepSeek-V3.2 -----------------------------------------------------------------------------

D_INDEX, N_INDEX = 64, 4


def as_v32(top_k: int) -> Callable[[dict[str, Any], Tensors], None]:
    """The demo with a random indexer in every layer and F32 norms, as the release has them."""

    def change(config: dict[str, Any], tensors: Tensors) -> None:
        config["architectures"] = ["DeepseekV32ForCausalLM"]
        config |= {"index_head_dim": D_INDEX, "index_n_heads": N_INDEX, "index_topk": top_k}
        rng = np.random.default_rng(5)

        def add(name: str, dtype: str, *shape: int) -> None:
            values = 0.1 * rng.standard_normal(shape)
            raw = bf16(values) if dtype == "BF16" else values.astype(np.float32).tobytes()
            tensors[name] = (Entry(name, dtype, shape), raw)

        for i in range(config["num_hidden_layers"] + 1):
            indexer = f"model.layers.{i}.self_attn.indexer."
            add(f"{indexer}k_norm.weight", "F32", D_INDEX)
            add(f"{indexer}k_norm.bias", "F32", D_INDEX)
            add(f"{indexer}weights_proj.weight", "BF16", N_INDEX, config["hidden_size"])
            add(f"{indexer}wk.weight", "BF16", D_INDEX, config["hidden_size"])
            add(f"{indexer}wq_b.weight", "BF16", N_INDEX * D_INDEX, config["q_lora_rank"])
        for name, (entry, raw) in list(tensors.items()):
            if "norm.weight" in name and entry.dtype == "BF16":
                tensors[name] = (entry._replace(dtype="F32"), rounded(raw).tobytes())

    return change


def test_v32_choosing_every_key_is_v3(v3: Answers, tmp_path: Path) -> None:
    source = changed_demo(tmp_path, as_v32(top_k=512))
    account = convert(source, tmp_path / "v32.gguf", ConvertOptions("f32"))
    assert account.mtp_block == 6
    assert answers(tmp_path / "v32.gguf") == v3


def test_v32_lacks_nothing_in_low_bits(tmp_path: Path) -> None:
    """The projection that weighs indexer heads stays F32, as llama.cpp's converter writes it."""
    source = changed_demo(tmp_path, as_v32(top_k=512))
    with plan(source, ConvertOptions("q4_0")) as job:
        types = {t.tensor.name: t.type.name for t in job.tensors}
    assert types["blk.2.indexer.proj.weight"] == "F32"
    assert types["blk.2.indexer.k_norm.bias"] == "F32"
    assert types["blk.2.indexer.attn_q_b.weight"] == "Q4_0"
    assert types["blk.6.indexer.attn_k.weight"] == "Q8_0"


def test_v32_that_chooses_keys_still_decodes_exactly(tmp_path: Path) -> None:
    source = changed_demo(tmp_path, as_v32(top_k=8))
    convert(source, tmp_path / "v32.gguf", ConvertOptions("f32"))
    drafted = answers(tmp_path / "v32.gguf")
    assert drafted.tokens == answers(tmp_path / "v32.gguf", depth=0).tokens
    assert sum(n for n, _ in drafted.judged) > 0


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [("index_topk", 0, "index_topk is 0"), ("index_head_dim", None, "index_head_dim is None")],
)
def test_v32_without_its_keys(tmp_path: Path, key: str, value: object, why: str) -> None:
    def change(config: dict[str, Any], tensors: Tensors) -> None:
        as_v32(8)(config, tensors)
        config[key] = value

    source = changed_demo(tmp_path, change, holes)
    with pytest.raises(ConversionError, match=why), plan(source, ConvertOptions()):
        pass


def test_v32_with_a_scale_the_run_time_does_not_apply(tmp_path: Path) -> None:
    config = V32 | {"rope_scaling": V32["rope_scaling"] | {"mscale": 0.7, "mscale_all_dim": 0.7}}
    source = write(tmp_path / "c", config, entries(config), holes)
    with pytest.raises(ConversionError, match=r"mscale is 0\.7"), plan(source, ConvertOptions()):
        pass


# -- GLM-4.7-Flash -----------------------------------------------------------------------------


def as_glm(config: dict[str, Any], _: Tensors) -> None:
    config["architectures"] = ["Glm4MoeLiteForCausalLM"]
    config["model_type"] = "glm4_moe_lite"
    del config["scoring_func"], config["moe_layer_freq"]


def test_glm_says_its_gating_function(v3: Answers, tmp_path: Path) -> None:
    """Unsaid, llama.cpp would take softmax at this size."""
    source = changed_demo(tmp_path, as_glm)
    convert(source, tmp_path / "glm.gguf", ConvertOptions("f32"))
    assert model_facts.read(tmp_path / "glm.gguf").kv["deepseek2.expert_gating_func"] == 2
    assert answers(tmp_path / "glm.gguf") == v3


# -- Logits, and DeepSeek-V2-Lite --------------------------------------------------------------


@pytest.mark.parametrize(
    "config", [GLM, LITE, V32], ids=["GLM-4.7-Flash", "DeepSeek-V2-Lite", "DeepSeek-V3.2"]
)
def test_logits_are_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    source = random_checkpoint(tmp_path / "checkpoint", config)
    out = tmp_path / "out.gguf"
    convert(source, out, ConvertOptions("f32"))
    tokens = [int(t) for t in np.random.default_rng(1).integers(4, 4000, 80)]
    with Model(str(out), ModelOptions()) as model:
        context = model.context(ContextOptions(256, 1, 128, 128, n_threads=1, strict=True))
        ours = context.decode([Rows(0, 0, tokens, 80)]).outputs[0].logits.copy()
    theirs = pytorch_logits(source, config, tokens)
    difference = np.abs(ours - theirs).max() / np.abs(theirs).max()
    print(f"relative difference {difference:.1e}")
    assert difference < 1e-4
    assert (ours.argmax(1) == theirs.argmax(1)).all()
    if config is V32:  # keys are left out, and that shows from the first query that has too many
        full = pytorch_logits(source, config | {"index_topk": 80}, tokens)
        apart = np.abs(theirs - full).max(1) / np.abs(theirs).max()
        assert (apart[:16] < 1e-4).all()
        assert (apart[16:] > 1e-2).all()


def test_glm_ends_with_each_of_its_tokens(tmp_path: Path) -> None:
    convert(random_checkpoint(tmp_path / "c", GLM), tmp_path / "o.gguf", ConvertOptions("f32"))
    facts = model_facts.read(tmp_path / "o.gguf")
    assert (facts.n_layer, facts.n_mtp, facts.can_draft) == (3, 1, True)
    with Model(facts.path) as model:
        assert model.vocab.end_tokens >= {1, 2, 3}


def test_lite_converts_and_says_why_it_cannot_draft(tmp_path: Path) -> None:
    account = convert(
        random_checkpoint(tmp_path / "c", LITE), tmp_path / "o.gguf", ConvertOptions()
    )
    assert any("q_lora_rank is null" in note for note in account.notes)
    facts = model_facts.read(tmp_path / "o.gguf")
    assert (facts.can_draft, facts.reason) == (False, "the file has no MTP block")


def test_lite_converts_whole_and_runs_plain(tmp_path: Path) -> None:
    """With a tokenizer of the release's steps; the commands say why nothing drafts."""
    source = random_checkpoint(tmp_path / "c", LITE)
    write_lite(source, lines()[:500], 2000)
    out = str(tmp_path / "o.gguf")
    convert(source, Path(out), ConvertOptions())
    assert model_facts.read(out).kv["tokenizer.ggml.pre"] == "deepseek-llm"
    flags = ["--raw", "--strict", "--max-tokens", "8", "--ctx", "256", "--threads", "1"]
    answer = CliRunner().invoke(app, ["run", out, *flags, "--prompt", "Hi 12", "--json"])
    assert answer.exit_code == 0
    found = json.loads(answer.stdout)
    assert len(found["tokens"]) == 8 or found["finish_reason"] == "stop"
    inspected = CliRunner().invoke(app, ["inspect", out])
    assert "the file has no MTP block" in " ".join(inspected.output.split())


def test_official_depth_of_lite_needs_no_query_key(tmp_path: Path) -> None:
    """At 27 layers the run time knows; at others it must be told that there is no query rank."""
    for n_layer, key in ((27, None), (3, 0)):
        config = LITE | {"num_hidden_layers": n_layer}
        source = write(tmp_path / str(n_layer), config, entries(config), holes)
        with plan(source, ConvertOptions()) as job:
            (tmp_path / "x.gguf").write_bytes(job.shards[0].header)
            with (tmp_path / "x.gguf").open("r+b") as file:
                file.truncate(job.n_bytes)
        facts = model_facts.read(tmp_path / "x.gguf")
        assert facts.kv.get("deepseek2.attention.q_lora_rank") == key


def test_v2_itself_is_refused(tmp_path: Path) -> None:
    config = LITE | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
    source = write(tmp_path / "c", config, entries(config), holes)
    with pytest.raises(ConversionError, match="topk_method is 'group_limited_greedy'"):
        convert(source, tmp_path / "o.gguf", ConvertOptions())


# -- Kimi-K2 and strangers ---------------------------------------------------------------------


def as_kimi(config: dict[str, Any], tensors: Tensors) -> None:
    """No MTP block, one group, RoPE frequencies in every layer."""
    config |= {"num_nextn_predict_layers": 0, "model_type": "kimi_k2", "n_group": 1}
    config |= {"topk_group": 1}
    config["rope_scaling"] = config["rope_scaling"] | {"beta_fast": 1.0, "beta_slow": 1.0}
    for name in [n for n in tensors if n.startswith("model.layers.6.")]:
        del tensors[name]
    for i in range(config["num_hidden_layers"]):
        name = f"model.layers.{i}.self_attn.rotary_emb.inv_freq"
        tensors[name] = (Entry(name, "BF16", (16,)), bytes(32))


def test_kimi_k2_converts_without_its_frequencies(tmp_path: Path) -> None:
    source = changed_demo(tmp_path, as_kimi)
    write_kimi(source, kimi_ranks(lines()[:500], 3000))
    account = convert(source, tmp_path / "kimi.gguf", ConvertOptions())
    dropped = {n: why for n, why in account.dropped.items() if "inv_freq" in n}
    assert len(dropped) == 6
    assert set(dropped.values()) == {"llama.cpp computes it"}
    assert account.mtp_block is None
    with Model(str(tmp_path / "kimi.gguf")) as model:
        context = model.context(ContextOptions(256, 1, 8, 8, n_threads=1))
        logits = context.decode([Rows(0, 0, [5, 6, 7], 1)]).outputs[0].logits
    assert np.isfinite(logits).all()


def test_another_family_is_refused_with_a_way_out(tmp_path: Path) -> None:
    source = changed_demo(
        tmp_path, lambda config, _: config.update(architectures=["Qwen3MoeForCausalLM"]), holes
    )
    with pytest.raises(ConversionError) as caught:
        convert(source, tmp_path / "o.gguf", ConvertOptions())
    for part in ("'Qwen3MoeForCausalLM'", "DeepseekV32ForCausalLM", "convert_hf_to_gguf.py"):
        assert part in str(caught.value)


def test_indexer_keys_that_would_abort_are_refused(tmp_path: Path) -> None:
    convert(changed_demo(tmp_path, as_v32(8)), tmp_path / "v32.gguf", ConvertOptions())
    raw = (tmp_path / "v32.gguf").read_bytes()
    key = b"deepseek32.attention.indexer.key_length\x04\0\0\0"
    for n in (32, 96):
        bad = raw.replace(key + D_INDEX.to_bytes(4, "little"), key + n.to_bytes(4, "little"))
        (tmp_path / "bad.gguf").write_bytes(bad)
        with pytest.raises(UnsupportedModel, match=f"indexer keys have {n} values"):
            model_facts.read(tmp_path / "bad.gguf")


def test_only_the_shards_of_the_block_are_needed(tmp_path: Path) -> None:
    source = changed_demo(tmp_path, lambda *_: None)
    everything = read_all(source)
    block = ("model.layers.6.", "model.embed_tokens.", "model.norm.", "lm_head.")
    near = [e for e, _ in everything.values() if e.name.startswith(block)]
    far = [e for e, _ in everything.values() if not e.name.startswith(block)]
    folder = tmp_path / "two"
    config = json.loads((CHECKPOINT / "config.json").read_text())
    data = dict(everything.values())
    write(folder, config, near, data.__getitem__)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= {e.name: "model-00009-of-00009.safetensors" for e in far}
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ConversionError, match=r"model-00009-of-00009\.safetensors is missing"):
        convert(folder, tmp_path / "o.gguf", ConvertOptions())
    convert(folder, tmp_path / "mtp.gguf", ConvertOptions(mtp="only", name="x"))
    convert(CHECKPOINT, tmp_path / "all.gguf", ConvertOptions(mtp="only", name="x"))
    assert (tmp_path / "mtp.gguf").read_bytes() == (tmp_path / "all.gguf").read_bytes()
