"""DeepSeek-V4 from its checkpoint on: converted, equal to transformers, run, and drafted for."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from typer.testing import CliRunner

from gguf_mtp.cli.app import app
from gguf_mtp.converters.convert import ConvertOptions, convert, side_path
from gguf_mtp.converters.graft import CopyOptions, graft
from gguf_mtp.errors import ConversionError, RequestError, UnsupportedModel
from gguf_mtp.gguf import model_facts, side_file
from gguf_mtp.llama import Context, ContextOptions, Model, ModelOptions
from gguf_mtp.loading.loader import LoadOptions, load
from gguf_mtp.params import SamplingParams
from gguf_mtp.types import Rows
from tests.support import v4_checkpoints

pytestmark = pytest.mark.native

GREEDY = SamplingParams(temperature=0)
N = 200
IDS = np.random.default_rng(7).integers(2, 4096, N).tolist()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return v4_checkpoints.tiny(tmp_path_factory.mktemp("v4") / "tiny-v4")


@pytest.fixture(scope="module")
def trunk(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trunk in F32, its MTP block beside it."""
    out = tmp_path_factory.mktemp("v4") / "tiny.gguf"
    convert(checkpoint, out, ConvertOptions(type="f32"))
    return out


def tensors(path: Path) -> dict[str, Any]:
    return {t.name: t for t in GGUFReader(path).tensors}


# -- conversion ----------------------------------------------------------------------------------


def test_the_block_is_a_file_of_its_own(trunk: Path) -> None:
    """It has its own way from four streams to one row, under the trunk's name for it."""
    side = side_path(trunk)
    facts, block = model_facts.read(trunk), model_facts.read_any(side)
    assert (facts.n_mtp, block.n_mtp, block.n_layer) == (0, 1, 6)
    assert side_file.find(facts)[0] is not None
    ours, theirs = tensors(trunk), tensors(side)
    assert not np.array_equal(ours["output_hc_fn.weight"].data, theirs["output_hc_fn.weight"].data)
    assert np.array_equal(ours["token_embd.weight"].data, theirs["token_embd.weight"].data)
    assert {name.split(".")[1] for name in theirs if name.startswith("blk.")} == {"6"}


def test_every_tensor_meets_a_known_end(checkpoint: Path, tmp_path: Path) -> None:
    for mtp, n_dropped in (("keep", 135), ("drop", 135), ("only", 783)):
        out = tmp_path / f"{mtp}.gguf"
        account = convert(checkpoint, out, ConvertOptions(type="q8_0", mtp=mtp))  # type: ignore[arg-type]
        assert account.n_read == 921
        assert account.n_written + account.n_merged + len(account.dropped) == 921
        assert len(account.dropped) == n_dropped
        assert side_path(out).exists() == (mtp == "keep")


@pytest.mark.parametrize("name", ["q8_0", "mxfp4", "q4_k_m"])
def test_fp4_experts_are_moved_bit_by_bit(
    checkpoint: Path, trunk: Path, name: str, tmp_path: Path
) -> None:
    """MXFP4 is what they are: the same numbers as in F32, whatever the rest becomes."""
    from gguf.quants import dequantize

    convert(checkpoint, tmp_path / "m.gguf", ConvertOptions(type=name))
    exact = tensors(trunk) | tensors(side_path(trunk))
    made = tensors(tmp_path / "m.gguf") | tensors(side_path(tmp_path / "m.gguf"))
    experts = [t for n, t in made.items() if "_exps." in n]
    assert len(experts) == 3 * 7
    for tensor in experts:
        assert tensor.tensor_type.name == "MXFP4"
        values = dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(values.ravel(), exact[tensor.name].data.ravel())
    assert made["blk.0.ffn_gate_tid2eid.weight"].tensor_type.name == "I32"
    kept = ("hc_", "_norm", "ape", "sinks", "ffn_gate_inp", "exp_probs", "indexer.proj")
    for tensor in made.values():
        if any(part in tensor.name for part in kept):
            assert tensor.tensor_type.name == "F32", tensor.name


def test_two_bits_are_two_bits(checkpoint: Path, tmp_path: Path) -> None:
    convert(checkpoint, tmp_path / "m.gguf", ConvertOptions(type="q2_k", mtp="drop"))
    kinds = {t.tensor_type.name for n, t in tensors(tmp_path / "m.gguf").items() if "_exps" in n}
    assert "MXFP4" not in kinds


def test_indices_and_side_by_side_rows(checkpoint: Path, trunk: Path) -> None:
    from safetensors import safe_open

    with safe_open(checkpoint / "model-00001-of-000002.safetensors", "np") as file:
        ids = file.get_tensor("layers.0.ffn.gate.tid2eid")
    np.testing.assert_array_equal(tensors(trunk)["blk.0.ffn_gate_tid2eid.weight"].data, ids)
    assert tensors(side_path(trunk))["blk.6.nextn.eh_proj.weight"].data.shape == (128, 256)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architectures": ["DeepseekV41ForCausalLM"]}, "V4.1 has other FP8 blocks"),
        ({"compress_ratios": [0, 0, 4]}, "a number for each of 6 layers"),
        ({"compress_ratios": [0, 0, 4, 2, 4, 128, 0]}, "compress_ratios holds 2"),
        ({"hc_mult": 2}, "hc_mult is 2, but llama.cpp runs 4"),
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
        ({"num_hash_layers": 7}, "num_hash_layers is 7 of 6"),
        ({"o_groups": 3}, "o_groups is 3"),
        ({"swiglu_limit": None}, "swiglu_limit is None"),
        ({"hidden_size": 256}, "but config.json implies"),
    ],
)
def test_what_is_not_v4_is_refused(
    checkpoint: Path, change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    copy = v4_checkpoints.changed(checkpoint, tmp_path / "changed", change)
    with pytest.raises(ConversionError, match=said):
        convert(copy, tmp_path / "m.gguf", ConvertOptions())
    assert not (tmp_path / "m.gguf").exists()


def test_from_the_command_line(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    done = CliRunner().invoke(app, ["convert", str(checkpoint), "-o", str(out), "--no-verify"])
    assert done.exit_code == 0, done.output
    assert "MTP block: in a file of its own" in done.output
    assert f"{side_path(out)} has" in done.output
    for wanted in (out, tmp_path / "other.gguf"):  # neither file of an earlier run is replaced
        side_path(wanted).touch()
        side_path(wanted).write_bytes(side_path(out).read_bytes())
        refused = CliRunner().invoke(app, ["convert", str(checkpoint), "-o", str(wanted)])
        assert "exists; --force replaces it" in str(refused.exception)
    assert not (tmp_path / "other.gguf").exists()
    third = ["convert", str(checkpoint), "-o", str(tmp_path / "third.gguf"), "--no-verify"]
    wrong = CliRunner().invoke(app, [*third, "--tensor-type", "attn_qqq=f16"])
    assert "matches no tensor" in str(wrong.exception)
    assert not list(tmp_path.glob("*third*"))
    in_one = ["--tensor-type", r"blk\.0\.attn_q_a\.=f16", "--tensor-type", "eh_proj=f16"]
    done = CliRunner().invoke(app, [*third, *in_one])  # each matches in one of the two files
    assert done.exit_code == 0, done.output
    kinds = tensors(tmp_path / "third.gguf") | tensors(tmp_path / "mtp-third.gguf")
    for name in ("blk.0.attn_q_a.weight", "blk.6.nextn.eh_proj.weight"):
        assert kinds[name].tensor_type.name == "F16"
    again = CliRunner().invoke(app, ["convert", str(checkpoint), "-o", str(out), "--dry-run"])
    assert "blk.6.nextn.eh_proj.weight" in again.output
    shown = CliRunner().invoke(app, ["inspect", str(out), "--json"])
    assert json.loads(shown.output)["can_draft"] is True


# -- equal to transformers -----------------------------------------------------------------------


def test_trunk_and_block_equal_transformers(checkpoint: Path, trunk: Path) -> None:
    """Over more rows than the window has, and than the indexer keeps keys of."""
    pytest.importorskip("transformers.models.deepseek_v4")
    from tests.support.v4_reference import Reference

    expected = Reference(checkpoint).run(IDS)
    options = ContextOptions(512, 1, 256, 256, n_threads=1, strict=True, hidden=True)
    with Model(str(trunk)) as model:
        out = model.context(options).decode([Rows(0, 0, IDS, N)]).outputs[0]
        assert off(out.logits, expected.logits) < 1e-5
        assert off(out.hidden, expected.hidden) < 1e-5
    with Model(str(side_path(trunk)), ModelOptions(load_mtp=True)) as side:
        context = side.context(dataclasses.replace(options, is_mtp=True, hidden=False))
        rows = Rows(0, 1, IDS[1:], N - 1, expected.hidden[:-1])
        block = context.decode([rows]).outputs[0]
        assert off(block.logits, expected.mtp_logits) < 1e-5
        assert off(block.hidden, expected.mtp_hidden) < 1e-5


def off(found: Any, expected: Any) -> float:
    """The largest difference over the largest value."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


# -- drafting ------------------------------------------------------------------------------------

PROMPTS = [IDS[:117], IDS[40:80], IDS[100:161]]
STRICT = LoadOptions(n_ctx=512, strict=True)


@pytest.fixture(scope="module")
def plain(trunk: Path) -> list[list[int]]:
    with load(trunk, dataclasses.replace(STRICT, draft="off")) as session:
        return [answers(session, [prompt])[0] for prompt in PROMPTS]


def answers(session: Any, prompts: list[list[int]]) -> list[list[int]]:
    found: dict[int, list[int]] = {i: [] for i in range(len(prompts))}
    for chunk in session.engine.generate(prompts, GREEDY, 50):
        found[chunk.seq] += chunk.tokens
    return list(found.values())


@pytest.fixture(scope="module")
def sharp(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where the block is found by itself."""
    out = tmp_path_factory.mktemp("beside") / "v4.gguf"
    convert(checkpoint, out, ConvertOptions(type="f32"))
    return out


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("n_seq", [1, 3])
def test_drafts_change_nothing(sharp: Path, plain: list[list[int]], depth: int, n_seq: int) -> None:
    """Of a random model nearly every draft is wrong, which is what rewinding is tried by."""
    options = dataclasses.replace(
        STRICT, n_seq=n_seq, draft="mtp", draft_min=depth, draft_max=depth
    )
    with load(sharp, options) as session:
        assert answers(session, PROMPTS[:n_seq]) == plain[:n_seq]
        assert session.engine.totals.drafted >= 40
        assert session.side is not None


@pytest.mark.parametrize(("asked", "kept"), [({}, 3), ({"draft_max": 8}, 8), ({"draft": "off"}, 0)])
def test_few_states_are_kept_unless_asked_for(
    sharp: Path, asked: dict[str, Any], kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every decode writes them all, even one that drafts nothing."""
    made: list[int] = []
    create = Model.context

    def noted(model: Model, options: ContextOptions) -> Context:
        made.append(options.n_rewind)
        return create(model, options)

    monkeypatch.setattr(Model, "context", noted)
    with load(sharp, dataclasses.replace(STRICT, **asked)) as session:
        assert session.engine.depth.n_max == kept
    assert max(made) == kept


def test_a_least_draft_beyond_what_suits_the_model_is_refused(sharp: Path) -> None:
    with pytest.raises(RequestError, match=r"draft_min is 5, but must be from 0 to draft_max \(3"):
        load(sharp, dataclasses.replace(STRICT, draft_min=5))


def test_a_combined_file_does_not_draft(trunk: Path) -> None:
    """It would with the trunk's output_hc_*: texts stay right and drafts are worse."""
    header = model_facts.read_header(trunk)
    kv = header.kv | {"deepseek4.block_count": 7, "deepseek4.nextn_predict_layers": 1}
    block = model_facts.read_header(side_path(trunk)).tensors
    both = header.tensors + tuple(t for t in block if t.name.startswith("blk."))
    facts = model_facts.facts(header._replace(kv=kv, tensors=both), "both.gguf")
    assert not facts.can_draft
    assert "convert it to a side file" in facts.reason


def test_grafting_is_refused(trunk: Path, tmp_path: Path) -> None:
    out = tmp_path / "both.gguf"
    with pytest.raises(ConversionError, match="must stay a file of its own"):
        graft(trunk, side_path(trunk), out, CopyOptions())
    assert not out.exists()


def test_the_block_of_another_model_is_refused(trunk: Path, tmp_path: Path) -> None:
    other = v4_checkpoints.tiny(tmp_path / "other", seed=1)
    convert(other, tmp_path / "mtp-o.gguf", ConvertOptions(type="f32", mtp="only"))
    with pytest.raises(UnsupportedModel, match="does not belong to"):
        load(trunk, dataclasses.replace(STRICT, draft_model=tmp_path / "mtp-o.gguf"))
