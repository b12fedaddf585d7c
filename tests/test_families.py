"""Other families than DeepSeek-V3: official names and keys, through llama.cpp, against PyTorch.

The demo's trained weights stand in where a family is V3's layout under other keys: then the text
and the drafts must be V3's own. Elsewhere random weights are compared with transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import INDEX, Entry, changed_demo, holes, layout, read_all, write
from test_layouts import Answers, answers

from gguf_mtp import metadata
from gguf_mtp.converters.convert import ConvertOptions, convert, plan
from gguf_mtp.demo import CHECKPOINT, demo_model
from gguf_mtp.errors import ConversionError, UnsupportedModel
from gguf_mtp.llama import ContextOptions, Model, ModelOptions
from gguf_mtp.types import Rows

pytestmark = pytest.mark.native

Tensors = dict[str, tuple[Entry, bytes]]


def bf16(values: np.ndarray) -> bytes:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()


def rounded(raw: bytes) -> np.ndarray:
    return (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)


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


# -- GLM-4.7-Flash -----------------------------------------------------------------------------


def as_glm(config: dict[str, Any], _: Tensors) -> None:
    config["architectures"] = ["Glm4MoeLiteForCausalLM"]
    config["model_type"] = "glm4_moe_lite"
    del config["scoring_func"], config["moe_layer_freq"]


def test_glm_says_its_gating_function(v3: Answers, tmp_path: Path) -> None:
    """Unsaid, llama.cpp would take softmax at this size."""
    source = changed_demo(tmp_path, as_glm)
    convert(source, tmp_path / "glm.gguf", ConvertOptions("f32"))
    assert metadata.read(tmp_path / "glm.gguf").kv["deepseek2.expert_gating_func"] == 2
    assert answers(tmp_path / "glm.gguf") == v3


GLM: dict[str, Any] = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": [1, 2, 3],
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 1024,
    "model_type": "glm4_moe_lite",
    "moe_intermediate_size": 48,
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 1.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "vocab_size": 4096,
}


# -- DeepSeek-V2-Lite --------------------------------------------------------------------------

LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "kv_lora_rank": 32,
    "max_position_embeddings": 128,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 48,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 4,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 4,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 32,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 32,
    "vocab_size": 4096,
}


def entries(config: Mapping[str, Any]) -> list[Entry]:
    """The release's tensors: V3's names in BF16, without what the family has not."""
    q_rank = config["q_lora_rank"]
    named = layout(dict(config) | {"q_lora_rank": q_rank or 1})
    plain = [e if e.dtype == "F32" else e._replace(dtype="BF16") for e in named]
    kept = [e for e in plain if not e.name.endswith("_scale_inv")]
    if q_rank is not None:
        return kept
    n_layer, n_query = config["num_hidden_layers"], config["num_attention_heads"] * 40
    lite = [
        Entry(e.name.replace("q_b_proj", "q_proj"), "BF16", (n_query, config["hidden_size"]))
        if ".q_b_proj." in e.name
        else e
        for e in kept
        if ".q_a_" not in e.name and "e_score" not in e.name
    ]
    return [e for e in lite if not e.name.startswith(f"model.layers.{n_layer}.")]


def random_checkpoint(folder: Path, config: Mapping[str, Any]) -> Path:
    rng = np.random.default_rng(7)

    def fill(entry: Entry) -> bytes:
        values = rng.standard_normal(entry.shape).astype(np.float32)
        if "norm" in entry.name:
            values = 1 + 0.1 * values
        elif "e_score" in entry.name:
            return (0.1 * values).tobytes()
        else:
            values *= 1.5 / np.sqrt(entry.shape[-1])
        return bf16(values)

    return write(folder, config, entries(config), fill, n_shards=2)


def pytorch_logits(folder: Path, config: Mapping[str, Any], tokens: list[int]) -> np.ndarray:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    given = {k: v for k, v in config.items() if k not in ("architectures", "model_type")}
    torch.manual_seed(0)
    for_type = AutoConfig.for_model(config["model_type"], **given)
    model = AutoModelForCausalLM.from_config(for_type, attn_implementation="eager").float().eval()
    weights = {
        name: torch.from_numpy(
            np.array(rounded(raw) if entry.dtype == "BF16" else np.frombuffer(raw, np.float32))
        ).view(entry.shape)
        for name, (entry, raw) in read_all(folder).items()
    }
    state, left = model.state_dict(), dict(weights)
    for name in state:
        if name in left:
            state[name] = left.pop(name)
        elif "experts.gate_up_proj" in name or "experts.down_proj" in name:
            state[name] = _stacked(name, left, config["n_routed_experts"])
    mtp = f"model.layers.{config['num_hidden_layers']}."
    assert not [n for n in left if not n.startswith(mtp)]
    model.load_state_dict(state)
    with torch.no_grad():
        logits: np.ndarray = model(torch.tensor([tokens])).logits[0].numpy()
    return logits


def _stacked(name: str, left: dict[str, Any], n_expert: int) -> Any:
    import torch

    layer = name.split("mlp.")[0]

    def take(part: str) -> Any:
        return [left.pop(f"{layer}mlp.experts.{e}.{part}_proj.weight") for e in range(n_expert)]

    if "down" in name:
        return torch.stack(take("down"))
    both = zip(take("gate"), take("up"), strict=True)
    return torch.stack([torch.cat(pair) for pair in both])


@pytest.mark.parametrize("config", [GLM, LITE], ids=["GLM-4.7-Flash", "DeepSeek-V2-Lite"])
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


def test_glm_ends_with_each_of_its_tokens(tmp_path: Path) -> None:
    convert(random_checkpoint(tmp_path / "c", GLM), tmp_path / "o.gguf", ConvertOptions("f32"))
    facts = metadata.read(tmp_path / "o.gguf")
    assert (facts.n_layer, facts.n_mtp, facts.can_draft) == (3, 1, True)
    with Model(facts.path) as model:
        assert model.vocab.end_tokens >= {1, 2, 3}


def test_lite_converts_and_says_why_it_cannot_draft(tmp_path: Path) -> None:
    account = convert(
        random_checkpoint(tmp_path / "c", LITE), tmp_path / "o.gguf", ConvertOptions()
    )
    assert any("q_lora_rank is null" in note for note in account.notes)
    facts = metadata.read(tmp_path / "o.gguf")
    assert (facts.can_draft, facts.reason) == (False, "the file has no MTP block")


def test_official_depth_of_lite_needs_no_query_key(tmp_path: Path) -> None:
    """At 27 layers the run time knows; at others it must be told that there is no query rank."""
    for n_layer, key in ((27, None), (3, 0)):
        config = LITE | {"num_hidden_layers": n_layer}
        source = write(tmp_path / str(n_layer), config, entries(config), holes)
        with plan(source, ConvertOptions()) as job:
            (tmp_path / "x.gguf").write_bytes(job.shards[0].header)
            with (tmp_path / "x.gguf").open("r+b") as file:
                file.truncate(job.n_bytes)
        facts = metadata.read(tmp_path / "x.gguf")
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
    account = convert(changed_demo(tmp_path, as_kimi), tmp_path / "kimi.gguf", ConvertOptions())
    dropped = {n: why for n, why in account.dropped.items() if "inv_freq" in n}
    assert len(dropped) == 6
    assert set(dropped.values()) == {"the run time computes it"}
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
            metadata.read(tmp_path / "bad.gguf")


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
