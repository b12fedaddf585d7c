"""What a DeepSeek-V3 checkpoint becomes, tensor by tensor, and every reason to refuse one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from numpy.typing import NDArray

from gguf_mtp.converters.convert import Account, ConvertOptions, Progress, convert
from gguf_mtp.converters.row_reader import e4m3_table
from gguf_mtp.demo import CHECKPOINT
from gguf_mtp.loading.loader import LoadOptions, load
from tests.support.checkpoints import Entry, changed_demo, read_all

pytestmark = pytest.mark.native  # ggml does the quantising

F32 = ConvertOptions("f32", n_threads=2, name="demo")
LAYER, MTP = "model.layers.3.", "model.layers.6."


@pytest.fixture(scope="module")
def source() -> dict[str, NDArray[np.float32]]:
    """The demo's weights as float32, read without the converter."""
    raw = read_all(CHECKPOINT)
    return {n: floats(raw, n) for n in raw if not n.endswith("_scale_inv")}


def floats(raw: dict[str, tuple[Entry, bytes]], name: str) -> NDArray[np.float32]:
    entry, data = raw[name]
    if entry.dtype == "F32":
        return np.frombuffer(data, np.float32).reshape(entry.shape)
    if entry.dtype == "BF16":
        bits = np.frombuffer(data, np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).reshape(entry.shape)
    value = e4m3_table()[np.frombuffer(data, np.uint8)].reshape(entry.shape)
    scale = floats(raw, f"{name}_scale_inv").repeat(128, 0).repeat(128, 1)
    return value * scale[: entry.shape[0], : entry.shape[1]]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[GGUFReader, Account]:
    out = tmp_path_factory.mktemp("convert") / "demo.gguf"
    account = convert(CHECKPOINT, out, F32)
    return GGUFReader(out), account


@pytest.fixture(scope="module")
def tensors(converted: tuple[GGUFReader, Account]) -> dict[str, NDArray[np.float32]]:
    """As numpy sees them, outermost dimension first."""
    return {t.name: t.data for t in converted[0].tensors}


@pytest.mark.parametrize(
    ("name", "origin"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output.weight", "lm_head.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight"),
        ("blk.3.attn_kv_a_mqa.weight", f"{LAYER}self_attn.kv_a_proj_with_mqa.weight"),
        ("blk.3.attn_q_b.weight", f"{LAYER}self_attn.q_b_proj.weight"),
        ("blk.3.ffn_gate_inp.weight", f"{LAYER}mlp.gate.weight"),
        ("blk.3.exp_probs_b.bias", f"{LAYER}mlp.gate.e_score_correction_bias"),
        ("blk.3.ffn_up_shexp.weight", f"{LAYER}mlp.shared_experts.up_proj.weight"),
        ("blk.6.nextn.eh_proj.weight", f"{MTP}eh_proj.weight"),
        ("blk.6.nextn.enorm.weight", f"{MTP}enorm.weight"),
        ("blk.6.nextn.hnorm.weight", f"{MTP}hnorm.weight"),
        ("blk.6.nextn.shared_head_norm.weight", f"{MTP}shared_head.norm.weight"),
        ("blk.6.attn_output.weight", f"{MTP}self_attn.o_proj.weight"),
    ],
)
def test_plain_tensors(
    tensors: dict[str, Any], source: dict[str, Any], name: str, origin: str
) -> None:
    np.testing.assert_array_equal(tensors[name], source[origin])


@pytest.mark.parametrize("part", ["gate", "up", "down"])
@pytest.mark.parametrize("layer", [1, 6])
def test_experts_are_stacked(
    tensors: dict[str, Any], source: dict[str, Any], part: str, layer: int
) -> None:
    experts = [source[f"model.layers.{layer}.mlp.experts.{e}.{part}_proj.weight"] for e in range(8)]
    np.testing.assert_array_equal(tensors[f"blk.{layer}.ffn_{part}_exps.weight"], np.stack(experts))


@pytest.mark.parametrize("layer", [0, 6])
def test_kv_b_is_split(tensors: dict[str, Any], source: dict[str, Any], layer: int) -> None:
    """4 heads of 32 key rows (transposed) and 32 value rows, 64 wide."""
    kv_b = source[f"model.layers.{layer}.self_attn.kv_b_proj.weight"].reshape(4, 64, 64)
    keys, values = tensors[f"blk.{layer}.attn_k_b.weight"], tensors[f"blk.{layer}.attn_v_b.weight"]
    np.testing.assert_array_equal(keys, kv_b[:, :32].transpose(0, 2, 1))
    np.testing.assert_array_equal(values, kv_b[:, 32:])


def test_metadata(converted: tuple[GGUFReader, Account]) -> None:
    kv = {name: field.contents() for name, field in converted[0].fields.items()}
    wanted: dict[str, Any] = {
        "general.architecture": "deepseek2",
        "general.name": "demo",
        "general.file_type": 0,
        "general.quantization_version": 2,
        "gguf_mtp.converter_version": "1",
        "general.sampling.temp": np.float32(0.6),
        "general.sampling.top_p": np.float32(0.95),
        "deepseek2.block_count": 7,
        "deepseek2.nextn_predict_layers": 1,
        "deepseek2.leading_dense_block_count": 1,
        "deepseek2.attention.head_count_kv": 1,
        "deepseek2.attention.key_length": 96,
        "deepseek2.attention.value_length": 64,
        "deepseek2.attention.key_length_mla": 64,
        "deepseek2.attention.value_length_mla": 32,
        "deepseek2.expert_gating_func": 2,
        "deepseek2.expert_group_count": 4,
        "deepseek2.expert_group_used_count": 2,
        "deepseek2.expert_weights_norm": True,
        "deepseek2.expert_weights_scale": 1.5,
        "deepseek2.rope.scaling.type": "yarn",
        "deepseek2.rope.scaling.factor": 4.0,
        "deepseek2.rope.scaling.original_context_length": 512,
        "deepseek2.rope.scaling.yarn_log_multiplier": np.float32(0.1),
        "deepseek2.rope.scaling.yarn_beta_fast": 32.0,
        "tokenizer.ggml.pre": "deepseek-v3",
        "tokenizer.ggml.add_bos_token": True,
    }
    assert {key: kv.get(key) for key in wanted} == wanted


def test_account(converted: tuple[GGUFReader, Account]) -> None:
    reader, account = converted
    n_experts = 6 * 8 * 3
    n_scales = sum(n.endswith("_scale_inv") for n in read_all(CHECKPOINT))
    assert account.n_read == 449 == account.n_written + account.n_merged + len(account.dropped)
    assert account.n_merged == n_experts + n_scales + 7  # every layer's kv_b
    assert set(account.dropped) == {f"{MTP}embed_tokens.weight", f"{MTP}shared_head.head.weight"}
    assert "bit-equal to lm_head.weight" in account.dropped[f"{MTP}shared_head.head.weight"]
    assert account.mtp_block == 6
    assert account.n_tensors == len(reader.tensors) == 128
    assert account.bytes_by_type == {"F32": sum(int(t.n_bytes) for t in reader.tensors)}
    ours = [t for t in reader.tensors if t.name.startswith("blk.6.")]
    assert account.mtp_bytes == sum(int(t.n_bytes) for t in ours)


def test_progress_ends_at_the_files_size(tmp_path: Path) -> None:
    seen: list[Progress] = []
    convert(CHECKPOINT, tmp_path / "out.gguf", F32, seen.append)
    assert [p.n_done for p in seen] == sorted(p.n_done for p in seen)
    assert seen[-1].n_done == seen[-1].n_total == (tmp_path / "out.gguf").stat().st_size
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.gguf"]


def test_any_number_of_threads_gives_the_same_bytes(tmp_path: Path) -> None:
    for n in (1, 5):
        convert(CHECKPOINT, tmp_path / f"{n}.gguf", ConvertOptions("q4_k_m", n_threads=n, name="x"))
    assert (tmp_path / "1.gguf").read_bytes() == (tmp_path / "5.gguf").read_bytes()


# -- variants --------------------------------------------------------------------------------------


def test_copies_that_differ_are_kept(tmp_path: Path) -> None:
    def change(_: dict[str, Any], tensors: dict[str, tuple[Entry, bytes]]) -> None:
        entry, raw = tensors[f"{MTP}shared_head.head.weight"]
        tensors[entry.name] = entry, raw[:-2] + b"\x80\x3f"  # the last weight becomes 1

    account = convert(changed_demo(tmp_path, change), tmp_path / "out.gguf", F32)
    assert set(account.dropped) == {f"{MTP}embed_tokens.weight"}
    heads = {t.name: t.data for t in GGUFReader(tmp_path / "out.gguf").tensors}
    assert heads["blk.6.nextn.shared_head_head.weight"][-1, -1] == 1
    assert (heads["blk.6.nextn.shared_head_head.weight"] != heads["output.weight"]).sum() == 1
    assert any("differs from lm_head.weight: kept" in note for note in account.notes)


def test_draft_head_is_written_in_its_own_type(tmp_path: Path) -> None:
    options = ConvertOptions("q8_0", draft_head="q4_k", n_threads=2)
    account = convert(CHECKPOINT, tmp_path / "out.gguf", options)
    types = {t.name: t.tensor_type.name for t in GGUFReader(tmp_path / "out.gguf").tensors}
    assert types["blk.6.nextn.shared_head_head.weight"] == "Q4_K"
    assert types["output.weight"] == "Q8_0"
    assert set(account.dropped) == {f"{MTP}embed_tokens.weight"}


def test_without_mtp(tmp_path: Path) -> None:
    account = convert(CHECKPOINT, tmp_path / "out.gguf", ConvertOptions("f32", mtp="drop"))
    reader = GGUFReader(tmp_path / "out.gguf")
    assert not [t.name for t in reader.tensors if t.name.startswith("blk.6.")]
    assert reader.fields["deepseek2.block_count"].contents() == 6
    assert "deepseek2.nextn_predict_layers" not in reader.fields
    assert account.mtp_block is None
    assert account.n_read == 449 == account.n_written + account.n_merged + len(account.dropped)


def no_mtp_tensors(_: dict[str, Any], tensors: dict[str, tuple[Entry, bytes]]) -> None:
    for name in [n for n in tensors if n.startswith(MTP)]:
        del tensors[name]


def test_trunk_only_checkpoint(tmp_path: Path) -> None:
    def change(config: dict[str, Any], tensors: dict[str, tuple[Entry, bytes]]) -> None:
        config["num_nextn_predict_layers"] = 0
        no_mtp_tensors(config, tensors)

    account = convert(changed_demo(tmp_path, change), tmp_path / "out.gguf", F32)
    assert account.mtp_block is None
    assert any("no MTP block" in note for note in account.notes)


def test_the_tensors_decide_when_the_configuration_is_silent(tmp_path: Path) -> None:
    def change(config: dict[str, Any], _: dict[str, tuple[Entry, bytes]]) -> None:
        del config["num_nextn_predict_layers"]

    account = convert(changed_demo(tmp_path, change), tmp_path / "out.gguf", F32)
    assert account.mtp_block == 6


@pytest.mark.parametrize(("n_group", "topk_group"), [(1, 1), (4, 4)])
def test_using_all_groups_is_having_none(tmp_path: Path, n_group: int, topk_group: int) -> None:
    """llama.cpp aborts on a file whose header says that all of several groups are used."""

    def change(config: dict[str, Any], _: dict[str, tuple[Entry, bytes]]) -> None:
        config |= {"n_group": n_group, "topk_group": topk_group}

    convert(changed_demo(tmp_path, change), tmp_path / "out.gguf", ConvertOptions(n_threads=2))
    fields = GGUFReader(tmp_path / "out.gguf").fields
    assert fields["deepseek2.expert_group_count"].contents() == 1
    assert fields["deepseek2.expert_group_used_count"].contents() == 1
    with load(tmp_path / "out.gguf", LoadOptions(n_ctx=256, n_threads=2)) as session:
        assert session.vocab.n_tokens == 4096


def test_bf16_block_in_an_fp8_checkpoint(tmp_path: Path, source: dict[str, Any]) -> None:
    """What is FP8 is decided by each tensor's scale, not by the configuration."""
    name = f"{MTP}self_attn.o_proj.weight"

    def change(_: dict[str, Any], tensors: dict[str, tuple[Entry, bytes]]) -> None:
        del tensors[f"{name}_scale_inv"]
        shape = tensors[name][0].shape
        bits = source[name].view(np.uint32) >> 16
        tensors[name] = Entry(name, "BF16", shape), bits.astype(np.uint16).tobytes()

    convert(changed_demo(tmp_path, change), tmp_path / "out.gguf", F32)
    tensors = {t.name: t.data for t in GGUFReader(tmp_path / "out.gguf").tensors}
    wanted = (source[name].view(np.uint32) >> 16 << 16).view(np.float32)
    np.testing.assert_array_equal(tensors["blk.6.attn_output.weight"], wanted)
