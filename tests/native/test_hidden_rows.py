"""Hidden rows are the model's, whatever else llama.cpp puts its memory to."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gguf_mtp.llama import Context, ContextOptions, Model, hidden_buffers
from gguf_mtp.loading.hidden_rows import check_hidden_rows
from gguf_mtp.types import Rows
from tests.support import recurrent_models

pytestmark = pytest.mark.native

ROOT = Path(__file__).parents[2]

OPTIONS = ContextOptions(512, 1, 16, 16, n_threads=1, strict=True, hidden=True)


@pytest.fixture(scope="module", params=["deepseek4", "qwen35moe", "bailingmoe3", "nemotron_h_moe"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    path = tmp_path_factory.mktemp("hidden") / f"{request.param}.gguf"
    with Model(str(recurrent_models.write(path, request.param))) as loaded:
        yield loaded


def hidden(context: Context, n: int, n_outputs: int) -> np.ndarray:
    context.rewind(0, 0)
    found = context.decode([Rows(0, 0, [(7 * i + 3) % 250 for i in range(n)], n_outputs)])
    rows = found.outputs[0].hidden
    assert rows is not None
    return rows.copy()


@pytest.mark.parametrize("n", [1, 2, 5, 16])
def test_rows_do_not_depend_on_what_else_is_put_out(model: Model, n: int) -> None:
    context = model.context(OPTIONS)
    assert context.decode([Rows(0, 0, [3], 0)]).outputs[0].hidden is not None
    np.testing.assert_array_equal(hidden(context, n, n), hidden(context, n, 0))
    context.close()


def test_their_width_is_the_models_own(tmp_path: Path) -> None:
    """Four residual streams in DeepSeek-V4."""
    for arch, width in (("deepseek4", 4 * recurrent_models.D), ("lfm2", recurrent_models.D)):
        path = recurrent_models.write(tmp_path / f"{arch}.gguf", arch)
        with Model(str(path)) as model:
            assert model.n_hidden == width


def test_without_a_new_layout_they_are_garbage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What `reserve_again` is there for, and that the check at start would find it."""
    path = recurrent_models.write(tmp_path / "m.gguf", "deepseek4")
    with Model(str(path)) as model:
        sound = model.context(OPTIONS)
        with caplog.at_level(logging.WARNING):
            check_hidden_rows(sound, "m.gguf")
        assert caplog.messages == []
        assert sound.n_past(0) == 0
        monkeypatch.setattr(hidden_buffers, "reserve_again", lambda _: None)
        wrong = model.context(OPTIONS)
        assert not np.allclose(hidden(wrong, 2, 2), hidden(sound, 2, 2), rtol=0.1)
        wrong.rewind(0, 0)
        with caplog.at_level(logging.WARNING):
            check_hidden_rows(wrong, "m.gguf")
        assert "hidden rows of m.gguf are not the model's" in caplog.text


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_loading_leaves_no_helpers_in_the_callers_thread() -> None:
    """OpenMP's helpers of a thread that only loads slow down the one that answers. PATIENCE_S
    bounds how long those of the ended thread may take to end."""
    count = "len(os.listdir('/proc/self/task'))"
    program = f"""
import os
import gguf_mtp, gguf_mtp.llama
from tests.support.waiting import wait_for
def load(draft):
    return gguf_mtp.load(options=gguf_mtp.LoadOptions(n_ctx=256, n_threads=2, draft=draft))
load("off").close()
before = {count}
with load("mtp"):
    wait_for(lambda: {count} <= before)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
