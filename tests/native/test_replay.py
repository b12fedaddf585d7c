"""Recorded answers as what the model says: the text is theirs, the drafts are the model's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from gguf_mtp.bench.replay import RECORDED, RecordedChain, read_recordings, replayed
from gguf_mtp.bench.shallow import shallow_copy
from gguf_mtp.cli.app import app
from gguf_mtp.demo import demo_model
from gguf_mtp.errors import RequestError
from gguf_mtp.loading.loader import LoadOptions, load
from gguf_mtp.params import RequestOptions, SamplingParams

pytestmark = pytest.mark.native

QUESTION = {"role": "user", "content": "What is the capital of France?"}


def line(answer: str, **more: str) -> str:
    return json.dumps({"messages": [QUESTION, {"role": "assistant", "content": answer}], **more})


def test_the_target_says_what_was_recorded_and_drafters_do_not_know() -> None:
    chain = RecordedChain([1, 2], [7, 8, 9])
    logits = np.zeros(12, np.float32)
    logits[3] = 5
    assert chain.target_probs(logits).ids.tolist() == [7]
    assert chain.target_probs(logits, [7, 4]).ids.tolist() == [9]
    assert chain.draft_probs(logits)[0].ids.tolist() == [3]
    chain.commit([7, 8, 9])
    assert chain.target_probs(logits).ids.tolist() == [9], "the end, however often it is asked"


@pytest.mark.parametrize("draft", ["ngram", "mtp", "off"])
def test_the_answer_is_the_recorded_one_whoever_drafts(tmp_path: Path, draft: str) -> None:
    """Copies are right where the text repeats itself."""
    passage = "one green cat, two red dogs and three grey mice; "
    file = tmp_path / "mine.jsonl"
    file.write_text(f"{line('The capital is Paris.')}\n\n{line(4 * passage, name='copies')}\n")
    recordings = read_recordings(file)
    assert [one.name for one in recordings] == ["mine", "copies"]
    options = LoadOptions(n_ctx=512, n_threads=1, draft=draft, draft_min=16, draft_max=16)
    with load(demo_model(), options) as session:
        loads = replayed(recordings, session)
        accepted = {}
        for load_ in loads:
            [(prompt, answer)] = load_.of_round(0, 1)
            assert answer is not None
            chain = RecordedChain(prompt, answer)
            found: list[int] = []
            for chunk in session.engine.generate(
                [prompt], SamplingParams(temperature=0), 400, RequestOptions(chain=chain)
            ):
                found += chunk.tokens
                if chunk.stats:
                    accepted[load_.name] = chunk.stats.by_drafter
            assert found == answer[:-1]
        if draft == "ngram":
            assert accepted["copies"]["ngram"][2] > len(answer) / 2


@pytest.mark.parametrize(
    "wrong", ["", "{", "[]", '{"messages": []}', json.dumps({"messages": [QUESTION]})]
)
def test_a_line_that_is_no_recording_is_named(tmp_path: Path, wrong: str) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text(f"{wrong}\n")
    said = "line 1: must be an object" if wrong else "holds no recorded answer"
    with pytest.raises(RequestError, match=said):
        read_recordings(file)
    with pytest.raises(RequestError, match="cannot read"):
        read_recordings(tmp_path / "none.jsonl")


def test_from_the_command_line() -> None:
    command = ["bench", "--replay", str(RECORDED), "--draft", "ngram", "--rounds", "1"]
    done = CliRunner().invoke(app, [*command, "--prompts", "1", "-n", "40", "--json"])
    assert done.exit_code == 0, done.output
    cells = json.loads(done.stdout)["cells"]
    assert [(c["workload"], c["way"]) for c in cells] == [
        (name, way) for name in ("rewrite", "summary", "prose") for way in ("plain", "ngram")
    ]
    assert all(cell["n_tokens"] == 40 for cell in cells)
    assert all(cell["x_plain"] > 0 for cell in cells)


def test_bench_measures_copies_where_there_is_no_block(tmp_path: Path) -> None:
    model = shallow_copy(demo_model(), tmp_path / "trunk.gguf", [0, 1])
    file = tmp_path / "mine.jsonl"
    file.write_text(line(6 * "one green cat, two red dogs; "))
    sizes = ["--replay", str(file), "--depths", "2", "--rounds", "1", "--prompts", "1", "-c", "512"]
    done = CliRunner().invoke(app, ["bench", str(model), *sizes, "--json"])
    assert done.exit_code == 0, done.output
    cells = {cell["way"]: cell for cell in json.loads(done.stdout)["cells"]}
    assert list(cells) == ["plain", "depth 2", "auto"]
    assert list(cells["depth 2"]["by_drafter"]) == ["ngram"]
    assert not cells["plain"]["by_drafter"]
