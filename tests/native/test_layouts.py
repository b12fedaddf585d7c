"""One model in every layout, through real llama.cpp: the same text, and the same drafts accepted.

Strict settings (F32, one thread), so nothing but equality passes.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from gguf_mtp.converters.convert import ConvertOptions, convert
from gguf_mtp.converters.graft import CopyOptions, extract, graft
from gguf_mtp.demo import CHECKPOINT, demo_model
from gguf_mtp.errors import UnsupportedModel
from gguf_mtp.gguf import model_facts, side_file
from gguf_mtp.loading.loader import LoadOptions, load
from gguf_mtp.params import SamplingParams

pytestmark = pytest.mark.native

PROMPTS = json.loads(Path("bench/prompts/held_out.json").read_text(encoding="utf-8"))[:4]
SHARD = 4_000_000


class Answers(NamedTuple):
    tokens: list[list[int]]
    judged: list[tuple[int, int]]  # drafted and accepted


def answers(path: Path, draft_model: Path | None = None, depth: int = 2) -> Answers:
    options = LoadOptions(
        n_ctx=512, draft_min=depth, draft_max=depth, strict=True, draft_model=draft_model
    )
    tokens, judged = [], []
    with load(path, options) as session:
        for prompt in PROMPTS:
            asked = session.chat_tokens([{"role": "user", "content": prompt}])
            answer: list[int] = []
            for chunk in session.engine.generate([asked], SamplingParams(temperature=0), 40):
                answer += chunk.tokens
            assert chunk.stats is not None
            tokens.append(answer)
            judged.append((chunk.stats.drafted, chunk.stats.accepted))
    return Answers(tokens, judged)


@pytest.fixture(scope="module")
def combined() -> Answers:
    found = answers(demo_model(kind="f32"))
    assert sum(accepted for _, accepted in found.judged) > 30
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's trunk, and its block in a folder of its own."""
    folder = tmp_path_factory.mktemp("layouts")
    convert(CHECKPOINT, folder / "demo.gguf", ConvertOptions("f32", mtp="drop"))
    (folder / "side").mkdir()
    convert(CHECKPOINT, folder / "side" / "mtp-demo.gguf", ConvertOptions("f32", mtp="only"))
    return folder


def side(folder: Path) -> Path:
    return folder / "side" / "mtp-demo.gguf"


def test_plain_text_is_the_reference(combined: Answers, folder: Path) -> None:
    assert answers(folder / "demo.gguf", depth=0).tokens == combined.tokens


def test_trunk_with_side_file(combined: Answers, folder: Path) -> None:
    assert answers(folder / "demo.gguf", side(folder)) == combined


def test_a_sibling_is_found_and_said_so(
    combined: Answers, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, sibling = tmp_path / "demo.gguf", tmp_path / "mtp-demo.gguf"
    model.symlink_to(folder / "demo.gguf")
    sibling.symlink_to(side(folder))
    with caplog.at_level(logging.INFO, "gguf_mtp.drafters.mtp"):
        assert answers(model) == combined
    assert f"drafting with {sibling}, found next to the model" in caplog.messages
    command = [sys.executable, "-c", "from gguf_mtp.cli.app import main; main()", "run", str(model)]
    done = subprocess.run([*command, "-p", "Hi", "-n", "4"], capture_output=True, text=True)
    assert done.stderr == (
        f"drafting with {sibling}, found in the model's folder\n"
        "note: the answer was cut off after 4 tokens (-n)\n"
    )


def test_grafted(combined: Answers, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "grafted.gguf"
    graft(folder / "demo.gguf", side(folder), out, CopyOptions())
    assert answers(out) == combined


def test_split(combined: Answers, tmp_path: Path) -> None:
    convert(CHECKPOINT, tmp_path / "demo.gguf", ConvertOptions("f32", split=SHARD))
    shards = sorted(tmp_path.iterdir())
    assert len(shards) > 3
    assert shards[0].name == f"demo-00001-of-{len(shards):05d}.gguf"
    assert answers(shards[0]) == combined


def test_split_trunk_grafted_into_a_split_file(combined: Answers, tmp_path: Path) -> None:
    convert(CHECKPOINT, tmp_path / "t.gguf", ConvertOptions("f32", mtp="drop", split=SHARD))
    convert(CHECKPOINT, tmp_path / "m.gguf", ConvertOptions("f32", mtp="only", split=SHARD))
    trunk, block = (sorted(tmp_path.glob(f"{name}-00001*"))[0] for name in "tm")
    assert answers(trunk, block) == combined
    done = graft(trunk, block, tmp_path / "g.gguf", CopyOptions(split=2 * SHARD))
    assert done.path.name.startswith("g-00001-of-")
    assert answers(done.path) == combined


def test_a_block_taken_out_drafts_the_same(combined: Answers, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "taken.gguf"
    extract(demo_model(kind="f32"), out, CopyOptions())
    assert answers(folder / "demo.gguf", out) == combined


def test_another_files_block_of_the_same_model_drafts(folder: Path) -> None:
    """What users do: a low-bit trunk, and a block from elsewhere, in other types."""
    found = answers(folder / "demo.gguf", demo_model(kind="q8_0"))
    assert found.tokens == answers(folder / "demo.gguf", depth=0).tokens
    assert sum(accepted for _, accepted in found.judged) > 30


def test_a_side_file_is_no_model(folder: Path) -> None:
    with pytest.raises(UnsupportedModel, match="an MTP block without the rest of the model; load"):
        load(side(folder))


def test_a_trunk_is_no_draft_file(folder: Path) -> None:
    both = LoadOptions(draft="mtp", draft_model=folder / "demo.gguf")
    with pytest.raises(UnsupportedModel, match="cannot draft for another file: the file has no"):
        load(folder / "demo.gguf", both)
    with pytest.raises(UnsupportedModel, match="cannot draft: the file has no MTP block"):
        load(folder / "demo.gguf", LoadOptions(draft="mtp"))


def test_off_looks_at_no_side_file(folder: Path, tmp_path: Path) -> None:
    with load(folder / "demo.gguf", LoadOptions(draft="off", draft_model=tmp_path / "no")) as s:
        assert (s.side, s.engine.is_drafting) == (None, False)


def test_a_strange_sibling_is_named_and_left(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "demo.gguf").symlink_to(folder / "demo.gguf")
    (tmp_path / "mtp-other.gguf").write_bytes(b"GGUF no more")
    with load(tmp_path / "demo.gguf") as session:
        assert session.engine.drafting.names == ("ngram",)
    assert caplog.messages[0].startswith("mtp-other.gguf next to the model is not used: ")


def test_a_combined_file_keeps_to_its_own_block(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "demo.gguf").symlink_to(demo_model(kind="f32"))
    (tmp_path / "mtp-demo.gguf").symlink_to(side(folder))
    with load(tmp_path / "demo.gguf") as session:
        assert session.side is None
        assert session.engine.is_drafting


def test_quantised_trunks_keep_their_side_file(folder: Path, tmp_path: Path) -> None:
    """The norm is the same to the bit in every type, and rows stay alike."""
    for kind in ("q2_k", "iq4_xs"):
        convert(CHECKPOINT, tmp_path / f"{kind}.gguf", ConvertOptions(kind, mtp="drop"))
        model = model_facts.read(tmp_path / f"{kind}.gguf")
        side_file.check(model, side_file.read(side(folder)))
