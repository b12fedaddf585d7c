"""Checkpoints that cannot be converted: one sentence that names the key or tensor, nothing written.

Only planning is needed for that, so weights are holes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gguf_mtp.converters.convert import ConvertOptions, convert, plan
from gguf_mtp.errors import ConversionError
from tests.support.checkpoints import Change, Entry, changed_demo, holes

Tensors = dict[str, tuple[Entry, bytes]]
LAYER, MTP = "model.layers.3.", "model.layers.6."
Q_A = f"{LAYER}self_attn.q_a_proj.weight"


def config(**changes: Any) -> Change:
    def change(config: dict[str, Any], _: Tensors) -> None:
        config |= changes

    return change


def without(*keys: str) -> Change:
    def change(config: dict[str, Any], _: Tensors) -> None:
        for key in keys:
            del config[key]

    return change


def rope(**changes: Any) -> Change:
    return lambda config, _: config["rope_scaling"].update(changes)


def fp8(**changes: Any) -> Change:
    return lambda config, _: config["quantization_config"].update(changes)


def drop(*names: str) -> Change:
    def change(_: dict[str, Any], tensors: Tensors) -> None:
        for name in [n for n in tensors if n.startswith(names)]:
            del tensors[name]

    return change


def add(*entries: Entry) -> Change:
    return lambda _, tensors: tensors.update({e.name: (e, b"") for e in entries})


def retype(name: str, **changes: Any) -> Change:
    def change(_: dict[str, Any], tensors: Tensors) -> None:
        tensors[name] = tensors[name][0]._replace(**changes), b""

    return change


def second_block(_: dict[str, Any], tensors: Tensors) -> None:
    for name, (entry, raw) in list(tensors.items()):
        if name.startswith(MTP):
            other = entry._replace(name=name.replace(MTP, "model.layers.7."))
            tensors[other.name] = other, raw


BAD: dict[str, tuple[Change, str]] = {
    "architecture": (
        config(architectures=["LlamaForCausalLM"]),
        "architecture 'LlamaForCausalLM' is not supported (supported: DeepseekV3ForCausalLM",
    ),
    "no architecture": (without("architectures"), "the configuration names no architectures"),
    "no gating": (without("scoring_func"), "scoring_func is None, but must be one of softmax"),
    "gating": (config(scoring_func="sqrtsoftplus"), "scoring_func is 'sqrtsoftplus'"),
    "selection": (config(topk_method="greedy"), "topk_method is 'greedy'"),
    "activation": (config(hidden_act="gelu"), "hidden_act is 'gelu'"),
    "expert layers": (config(moe_layer_freq=2), "moe_layer_freq is 2"),
    "no width": (without("hidden_size"), "hidden_size is None, but must be a whole number"),
    "width in words": (config(hidden_size="256"), "hidden_size is '256'"),
    "no heads": (config(num_attention_heads=0), "num_attention_heads is 0"),
    "no compressed query": (config(q_lora_rank=None), "no model.layers.0.self_attn.q_proj.weight"),
    "epsilon": (config(rms_norm_eps=0), "rms_norm_eps is 0, but must be a number above 0"),
    "more experts used than there are": (
        config(num_experts_per_tok=9),
        "num_experts_per_tok is 9, but the model has only 8 experts",
    ),
    "groups of one": (config(n_group=8), "n_group is 8, which does not divide 8 experts"),
    "groups used": (config(topk_group=5), "topk_group is 5, but n_group is 4"),
    "more experts than llama.cpp takes": (
        config(n_routed_experts=1032),
        "n_routed_experts is 1032, but must be a whole number from 1 to 1024",
    ),
    "no expert layer": (config(first_k_dense_replace=6), "first_k_dense_replace is 6"),
    "lite depth": (config(num_hidden_layers=27), "num_hidden_layers is 27, a depth at"),
    "rope": (rope(type="longrope"), "RoPE scaling is 'longrope', but only 'yarn'"),
    "rope factor": (rope(factor="four"), "factor is 'four'"),
    "mscale": (rope(mscale=0.7), "mscale is 0.7 and mscale_all_dim 1.0"),
    "no mscale": (rope(mscale=0, mscale_all_dim=0), "mscale is 0 and mscale_all_dim 0"),
    "quantisation": (fp8(quant_method="awq"), "quantised with 'awq' ('e4m3'), but only"),
    "format": (fp8(fmt="e5m2"), "quantised with 'fp8' ('e5m2'), but only"),
    "no block size": (fp8(weight_block_size=None), "weight_block_size is None"),
    "other block size": (
        fp8(weight_block_size=[64, 64]),
        "model.layers.0.self_attn.q_a_proj.weight_scale_inv has shape [1, 2], "
        "but blocks of 64x64 require [2, 4]",
    ),
    "fp8 unannounced": (without("quantization_config"), "is FP8, but config.json has no"),
    "no scale": (drop(f"{Q_A}_scale_inv"), f"{Q_A} is FP8, but {Q_A}_scale_inv is missing"),
    "scale dtype": (
        retype(f"{Q_A}_scale_inv", dtype="BF16"),
        f"{Q_A}_scale_inv is BF16, but must be one of F32, F8_E8M0, U8",
    ),
    "scale without fp8": (retype(Q_A, dtype="BF16"), f"{Q_A} is BF16, but has a scale tensor"),
    "dtype": (retype(f"{LAYER}input_layernorm.weight", dtype="I8"), "input_layernorm.weight is I8"),
    "missing tensor": (drop(f"{LAYER}mlp.gate.weight"), f"no {LAYER}mlp.gate.weight"),
    "missing expert": (
        drop(f"{LAYER}mlp.experts.5.up_proj"),
        f"no {LAYER}mlp.experts.5.up_proj.weight, which this architecture needs",
    ),
    "missing bias": (
        drop(f"{LAYER}mlp.gate.e_score_correction_bias"),
        f"no {LAYER}mlp.gate.e_score_correction_bias",
    ),
    "missing head": (drop("lm_head"), "no lm_head.weight"),
    "missing in the block": (drop(f"{MTP}hnorm"), f"no {MTP}hnorm.weight"),
    "shape": (
        retype("model.norm.weight", shape=(128,)),
        "model.norm.weight has shape [128], but config.json implies [256]",
    ),
    "embedding rows": (
        config(vocab_size=4097),
        "model.embed_tokens.weight has shape [4096, 256], but config.json implies [4097, 256]",
    ),
    "unknown tensor": (
        add(Entry(f"{LAYER}self_attn.indexer.k_norm.weight", "BF16", (4,))),
        f"{LAYER}self_attn.indexer.k_norm.weight is unknown; leaving it out would change the",
    ),
    "orphan scale": (add(Entry("model.norm.weight_scale_inv", "F32", (1,))), "has a scale tensor"),
    "promised block": (
        drop(MTP),
        "config.json declares 1 MTP block, but the checkpoint has no model.layers.6.*",
    ),
    "two blocks": (second_block, "2 MTP blocks (layers 6 to 7), but llama.cpp runs only one"),
    "two promised": (config(num_nextn_predict_layers=2), "2 MTP blocks (layers 6 to 6)"),
}


@pytest.mark.parametrize(("change", "says"), BAD.values(), ids=BAD)
def test_refuses(tmp_path: Path, change: Change, says: str) -> None:
    source = changed_demo(tmp_path, change, holes)
    with pytest.raises(ConversionError) as error:
        convert(source, tmp_path / "out.gguf", ConvertOptions())
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]


def test_tokenizer_larger_than_the_embedding(tmp_path: Path) -> None:
    def change(config: dict[str, Any], tensors: Tensors) -> None:
        config["vocab_size"] = 4000
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = tensors[name][0]._replace(shape=(4000, 256)), b""
        for name in (f"{MTP}embed_tokens.weight", f"{MTP}shared_head.head.weight"):
            tensors[name] = tensors[name][0]._replace(shape=(4000, 256)), b""

    source = changed_demo(tmp_path, change, holes)
    with pytest.raises(ConversionError, match="token id 4095, but the embedding has 4000 rows"):
        convert(source, tmp_path / "out.gguf", ConvertOptions())


def unchanged(_: dict[str, Any], __: Tensors) -> None:
    pass


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (ConvertOptions("q9_k"), "unknown type 'q9_k'; known types: f32"),
        (ConvertOptions(tensor_types=("ffn",)), "'ffn' is not PATTERN=TYPE"),
        (ConvertOptions(tensor_types=("ffn=q9",)), "unknown tensor type 'q9'"),
        (ConvertOptions(tensor_types=("(=q8_0",)), "'(' is not a regular expression"),
        (ConvertOptions(draft_head="tiny"), "unknown tensor type 'tiny'"),
        (
            ConvertOptions(tensor_types=("blk.2.ffn_up_exps=iq2_xxs",)),
            "blk.2.ffn_up_exps.weight as iq2_xxs needs an importance matrix; use --imatrix",
        ),
        (ConvertOptions("q2_k_s"), "attn_q_a.weight as q2_k needs an importance matrix"),
        (ConvertOptions(tensor_types=("token_embd=iq1_s",)), "token_embd.weight as iq1_s needs"),
        (ConvertOptions(imatrix=Path("nowhere.gguf")), "cannot read nowhere.gguf"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refuses_options(tmp_path: Path, options: ConvertOptions, says: str) -> None:
    source = changed_demo(tmp_path, unchanged, holes)
    with pytest.raises(ConversionError) as error, plan(source, options):
        pass
    assert says in str(error.value)


def test_a_sound_one_is_not_refused(tmp_path: Path) -> None:
    with plan(changed_demo(tmp_path, unchanged, holes), ConvertOptions()) as job:
        assert job.account.n_tensors == 128


@pytest.mark.parametrize("damage", [lambda p: p.unlink(), lambda p: p.write_text("{}")])
def test_no_usable_tokenizer(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    source = changed_demo(tmp_path, unchanged, holes)
    damage(source / "tokenizer.json")
    with pytest.raises(ConversionError, match=r"tokenizer\.json"), plan(source, ConvertOptions()):
        pass
