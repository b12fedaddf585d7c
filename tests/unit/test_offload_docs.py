"""The plans in docs/PLACEMENT.md are what the command prints."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from gguf_mtp.bench.synthetic import V3
from gguf_mtp.cli.plan import plan
from gguf_mtp.offload.advice import rate

DOCUMENT = Path(__file__).parents[2] / "docs" / "PLACEMENT.md"
EXAMPLES = re.findall(
    r"```\n\$ gguf-mtp plan (--config config\.json .*)\n([^`]*)```",
    DOCUMENT.read_text(encoding="utf-8"),
)
app = typer.Typer()
app.command()(plan)


@pytest.mark.parametrize(("arguments", "printed"), EXAMPLES, ids=[a for a, _ in EXAMPLES])
def test_example(
    arguments: str, printed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(V3))
    result = CliRunner().invoke(app, arguments.split())
    assert result.exit_code == 0, result.output
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    for part in printed.strip().split("...\n"):
        wanted = part.strip("\n").splitlines()
        at = lines.index(wanted[0])
        assert lines[at : at + len(wanted)] == wanted


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 4


def test_json_is_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(V3))
    command = "--config config.json --vram 24G --ram 512G --parallel 4 --cache-type q8_0 --json"
    found = json.loads(CliRunner().invoke(app, command.split()).stdout)
    assert [d["name"] for d in found["devices"]] == ["GPU0", "CPU"]
    assert all(d["used"] <= d["budget"] for d in found["devices"])
    places = {t["name"]: t["device"] for t in found["tensors"]}
    assert places["blk.61.nextn.eh_proj.weight"] == places["blk.0.attn_output.weight"] == "GPU0"
    assert places["token_embd.weight"] == places["blk.30.ffn_up_exps.weight"] == "CPU"
    assert len(places) == 1108
    assert found["context"]["cells"] == 4 * 8192
    assert found["context"]["cache_type_k"] == "q8_0"
    # One cell of a layer is 576 values: 18 blocks of 34 bytes.
    assert sum(found["context"]["cache_bytes"].values()) == 62 * 4 * 8192 * 18 * 34


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("x.gguf --config config.json", "give a model file or --config"),
        ("--config config.json --vram 24X", "'24X' is not a size"),
        ("--config config.json --type q9", "unknown type 'q9'"),
        ("--config config.json --vram 8G --cache-type q2_k", "cache type 'q2_k' is not one of"),
    ],
)
def test_mistakes_are_sentences(
    arguments: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(V3))
    result = CliRunner().invoke(app, arguments.split())
    assert says in str(result.exception)


def test_a_model_that_does_not_fit_is_an_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table is printed all the same: it says what is missing."""
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(V3))
    command = ["--config", "config.json", "--vram", "24G", "--ram", "64G"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert "prediction  if it fitted: plain " in result.stdout
    assert "would be in CPU memory, but only 64.0 GiB is available" in result.stdout
    found = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert found["fits"] is False


@pytest.mark.parametrize(
    ("value", "printed"),
    [(158730.6, "160,000"), (3844.9, "3,800"), (99.6, "100"), (24.4, "24"), (6.04, "6.0"),
     (0.996, "1.0"), (0.5349, "0.53"), (0.0, "0")],
)  # fmt: skip
def test_predictions_have_two_digits(value: float, printed: str) -> None:
    assert rate(value) == printed
