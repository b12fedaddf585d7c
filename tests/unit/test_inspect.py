from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from gguf_mtp.cli.inspect import inspect
from gguf_mtp.errors import LoadFailed, UnsupportedModel
from gguf_mtp.gguf import missing_keys, model_facts
from gguf_mtp.loading.select import DraftOptions, select_drafters
from tests.support.gguf_files import Model, header, value
from tests.unit.test_side_file import side, trunk

app = typer.Typer()
app.command()(inspect)


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    return Model().write(tmp_path / "sound.gguf")


def test_json_has_the_documented_keys(sound: Path) -> None:
    result = CliRunner().invoke(app, [str(sound), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    placement = found.pop("placement")
    assert re.match(r"CPU [\d.]+ MiB \(3 layers, output, experts of 2 layers\)$", placement)
    assert found.pop("tensors")["output"] == {"F32": 300 * 32 * 4}
    assert found == {
        "path": str(sound),
        "name": "tiny",
        "file_bytes": sound.stat().st_size,
        "architecture": "deepseek2",
        "n_layer": 2,
        "n_mtp": 1,
        "can_draft": True,
        "reason": "blk.2 is an MTP block that llama.cpp can run",
        "side_file": None,
        "missing_keys": [],
        "context_length": 256,
        "vocab": 300,
    }


def test_the_table_is_plain_text_in_a_pipe(sound: Path) -> None:
    result = CliRunner().invoke(app, [str(sound)])
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.stdout
    lines = result.stdout.splitlines()
    assert lines[0] == f"tiny  {sound}"
    assert lines[1].startswith("deepseek2, 2 layers, 1 MTP, context 256, vocabulary 300, ")
    assert lines[2] == "drafts: blk.2 is an MTP block that llama.cpp can run"
    assert lines[3].startswith("placement: CPU ")
    cells = [line.split() for line in lines[5:]]
    assert cells[0] == ["tensors", "type", "size", "share"]
    assert ["output", "F32", "37.5", "KiB", "16.4%"] in cells
    shares = [float(row[-1].rstrip("%")) for row in cells[2:]]
    assert shares == sorted(shares, reverse=True)
    assert abs(sum(shares) - 100) < 0.5


def test_keys_without_which_the_text_differs_are_named(tmp_path: Path) -> None:
    model = Model(hyper=Model().hyper | {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0})
    for key in ("rope.freq_base", "expert_gating_func", "expert_weights_norm"):
        del model.hyper[key]
    path = model.write(tmp_path / "m.gguf")
    wanted = (
        "deepseek2.expert_gating_func",
        "deepseek2.expert_weights_norm",
        "deepseek2.rope.freq_base",
        "deepseek2.rope.scaling.original_context_length",
    )
    facts = model_facts.read(path)
    assert missing_keys.missing_keys(facts) == wanted
    assert missing_keys.warning(facts) == (
        f"{path} lacks {', '.join(wanted)}: llama.cpp uses defaults, so the text may differ from "
        "the original model's"
    )
    said = f"lacks {', '.join(wanted)}: llama.cpp uses defaults, so the text may differ"
    assert said in CliRunner().invoke(app, [str(path)]).stdout.splitlines()
    found = json.loads(CliRunner().invoke(app, [str(path), "--json"]).stdout)
    assert found["missing_keys"] == list(wanted)


def test_a_file_needs_only_the_keys_of_its_kind(tmp_path: Path) -> None:
    """A router without a bias is V2's, a SentencePiece vocabulary has no pre-tokenizer."""
    model = Model()
    for key in ("expert_gating_func", "expert_weights_norm", "expert_weights_scale"):
        del model.hyper[key]
    for index in (1, 2):
        del model.shapes[f"blk.{index}.exp_probs_b.bias"]
    facts = model_facts.read(model.write(tmp_path / "m.gguf"))
    assert missing_keys.missing_keys(facts) == ()
    plain = {k: v for k, v in facts.kv.items() if k != "tokenizer.ggml.pre"}
    without = replace(facts, kv=plain)
    assert missing_keys.missing_keys(without) == ("tokenizer.ggml.pre",)
    without.kv["tokenizer.ggml.model"] = "llama"
    assert missing_keys.missing_keys(without) == ()


def test_a_name_that_looks_like_markup_is_shown_as_it_is(tmp_path: Path) -> None:
    path = Model(extra={"general.name": "[bold]x[/]"}).write(tmp_path / "m.gguf")
    assert CliRunner().invoke(app, [str(path)]).stdout.startswith("[bold]x[/]  ")


def test_a_bad_file_raises_for_the_entry_point_to_print(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"")
    result = CliRunner().invoke(app, [str(bad)])
    assert isinstance(result.exception, LoadFailed)


def test_a_side_file_next_to_a_model_is_what_drafts(tmp_path: Path) -> None:
    """`run` takes it; inspect said "does not draft"."""
    model = trunk(tmp_path / "model.gguf")
    side(tmp_path / "mtp-model.gguf")
    result = CliRunner().invoke(app, [str(model), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["can_draft"] is True
    assert found["reason"] == "mtp-model.gguf next to it holds its MTP block"
    assert found["side_file"] == str(tmp_path / "mtp-model.gguf")
    assert "(3 layers, output" in found["placement"]  # the block is one
    (tmp_path / "mtp-model.gguf").unlink()
    found = json.loads(CliRunner().invoke(app, [str(model), "--json"]).stdout)
    assert (found["can_draft"], found["side_file"]) == (False, None)


@pytest.mark.parametrize(("arch", "name"), [("eagle3", "an EAGLE-3"), ("dflash", "a DFlash")])
def test_a_draft_head_is_refused_by_name(tmp_path: Path, arch: str, name: str) -> None:
    """It ran, from an input that nothing fills."""
    path = tmp_path / "head.gguf"
    path.write_bytes(header({"general.architecture": value(arch)}, []))
    for read in (model_facts.read, model_facts.read_any):
        with pytest.raises(UnsupportedModel, match=f"head.gguf is {name} head"):
            read(path)
    model = model_facts.read(trunk(tmp_path / "model.gguf"))
    with pytest.raises(UnsupportedModel, match=f"head.gguf is {name} head"):
        select_drafters(model, DraftOptions("auto", path, False))
