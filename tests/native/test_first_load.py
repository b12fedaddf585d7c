"""Whatever a GGUF holds, the process lives: a child finds what llama.cpp would end it over."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from random import Random

import pytest

from gguf_mtp.demo import demo_model
from gguf_mtp.errors import GgufMtpError, LoadFailed, UnsupportedModel
from gguf_mtp.gguf import model_facts
from gguf_mtp.loading import first_load
from gguf_mtp.loading.first_load import FirstLoad
from gguf_mtp.loading.loader import LoadOptions, load
from gguf_mtp.params import SamplingParams
from tests.support import gguf_mutants, recurrent_models
from tests.support.gguf_files import Model

pytestmark = pytest.mark.native


def tiny(path: Path, change: Callable[[Model], object] = lambda _: None) -> FirstLoad:
    model = Model()
    change(model)
    facts = model_facts.read(model.write(path))
    return FirstLoad(facts, facts.can_draft)


def spm(model: Model) -> None:
    """A SentencePiece tokenizer over a vocabulary without its byte tokens."""
    model.extra["tokenizer.ggml.model"] = "llama"


def test_an_abort_becomes_a_sentence(tmp_path: Path) -> None:
    file = tiny(tmp_path / "spm.gguf", spm)
    with pytest.raises(UnsupportedModel) as caught:
        first_load.check([file], tmp_path / "loaded")
    assert str(caught.value) == (
        f"{tmp_path}/spm.gguf cannot be run: llama.cpp ended the process while reading a text "
        "with its vocabulary (unordered_map::at)"
    )
    assert not (tmp_path / "loaded").exists()


def test_load_asks_first(tmp_path: Path) -> None:
    """Without the check this process would end here."""
    with pytest.raises(UnsupportedModel, match="reading a text with its vocabulary"):
        load(tiny(tmp_path / "spm.gguf", spm).facts.path)


def test_what_llama_cpp_refuses_is_told_in_its_words(tmp_path: Path) -> None:
    file = tiny(tmp_path / "m.gguf", lambda m: m.shapes.pop("blk.0.attn_output.weight"))
    with pytest.raises(LoadFailed, match=r"m.gguf: .*blk\.0\.attn_output\.weight"):
        first_load.check([file], tmp_path / "loaded")


def test_a_file_that_came_through_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "loaded"
    file = tiny(tmp_path / "m.gguf")
    first_load.check([file], folder)
    assert len(list(folder.iterdir())) == 1

    def not_again(*_: object, **__: object) -> None:
        raise AssertionError("loaded again")

    monkeypatch.setattr(first_load, "run_module", not_again)
    first_load.check([file], folder)
    moved = tiny(tmp_path / "moved.gguf")  # the same contents under another name
    first_load.check([moved], folder)
    with pytest.raises(AssertionError, match="loaded again"):
        first_load.check([file], folder, always=True)
    with pytest.raises(AssertionError, match="loaded again"):  # without its block: another load
        first_load.check([file._replace(with_block=False)], folder)
    other = tiny(tmp_path / "m.gguf", lambda m: m.hyper.update({"rope.freq_base": 5e5}))
    with pytest.raises(AssertionError, match="loaded again"):
        first_load.check([other], folder)


def test_a_load_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_load, "SECONDS", 0.0)
    with pytest.raises(UnsupportedModel, match="did not finish starting within 0 s"):
        first_load.check([tiny(tmp_path / "m.gguf")], tmp_path / "loaded")


def test_of_a_large_file_the_graph_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The vocabulary and the graph still end the child; nothing is computed."""
    monkeypatch.setattr(first_load, "MOST_BYTES", 0)
    first_load.check([tiny(tmp_path / "m.gguf")], tmp_path / "loaded")
    with pytest.raises(UnsupportedModel, match="reading a text with its vocabulary"):
        first_load.check([tiny(tmp_path / "spm.gguf", spm)], tmp_path / "loaded")


def test_a_killed_child_says_nothing_about_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As when memory is short: the file is loaded all the same, and checked again next time."""
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    (tmp_path / "python").write_text("#!/bin/sh\nkill -9 $$\n")
    (tmp_path / "python").chmod(0o755)
    first_load.check([tiny(tmp_path / "m.gguf")], tmp_path / "loaded")
    assert "was killed" in caplog.text
    assert not (tmp_path / "loaded").exists()


# -- mutants -------------------------------------------------------------------------------------

N_MUTANTS = 400
"""Of each of five architectures."""
SECONDS = 10.0
TEMPLATE = b"{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
ENDS = {0: "ran", 1: "refused", 2: "traceback"}


def forked(use: Callable[[], int]) -> str:
    """How a fork of this process ends that does `use`."""
    child = os.fork()
    if child == 0:
        code = 2
        try:
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1), os.dup2(quiet, 2)
            code = use()
        finally:
            os._exit(code)
    start = time.monotonic()
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() - start > first_load.SECONDS + SECONDS:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "hang"
        time.sleep(0.01)
    if os.WIFSIGNALED(status):
        return f"signal {os.WTERMSIG(status)}"
    return ENDS[os.WEXITSTATUS(status)]


def use(path: Path) -> int:
    """Loads the file, writes four tokens and answers; the key of `ENDS`."""
    try:
        with load(path, LoadOptions(n_ctx=128, n_threads=1, draft_min=2, draft_max=2)) as session:
            for _ in session.complete("The 7 of", SamplingParams(temperature=0), 4):
                pass
            for _ in session.chat([{"role": "user", "content": "Hi"}], None, 2):
                pass
    except GgufMtpError:
        return 1
    return 0


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="mutants run in forks of this process")
@pytest.mark.parametrize("arch", ["demo", "deepseek2", "glm4moe", "qwen35moe", "bailingmoe3"])
def test_mutants(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_load, "SECONDS", 20.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sound = gguf_mutants.parse(sound_file(arch, tmp_path).read_bytes())
    sound.kv.setdefault(b"tokenizer.chat_template", (gguf_mutants.STRING, TEMPLATE))
    path, ends, wrong = tmp_path / "mutant.gguf", Counter[str](), []
    for what, mutant in islice(gguf_mutants.mutants(sound, Random(arch)), N_MUTANTS):
        if not mutant.write(path):
            continue
        end = forked(lambda: use(path))
        ends[end] += 1
        if end not in ("ran", "refused"):
            wrong.append(f"{what}: {end}")
    print(arch, dict(ends))
    assert wrong == []
    assert min(ends["ran"], ends["refused"]) > 20


def sound_file(arch: str, folder: Path) -> Path:
    if arch == "demo":
        return demo_model()
    if arch == "deepseek2":
        return Model().write(folder / "m.gguf")
    if arch == "glm4moe":
        from tests.unit.test_nextn import glm4moe

        return glm4moe().write(folder / "m.gguf")
    return recurrent_models.write(folder / "m.gguf", arch)
