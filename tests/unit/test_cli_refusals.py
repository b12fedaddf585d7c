"""Options that no command could follow: refused in a sentence, before anything is loaded, measured
or written over."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gguf_mtp.cli.app import app
from gguf_mtp.cli.http_server import listen
from gguf_mtp.cli.log_files import open_files
from gguf_mtp.cli.rpc_child import CHILD, command
from gguf_mtp.cli.sampling_options import SamplingArgs
from gguf_mtp.converters.checkpoint import folder_name
from gguf_mtp.errors import GgufMtpError, RequestError
from gguf_mtp.loading.loader import LoadOptions
from gguf_mtp.params import SamplingParams
from gguf_mtp.server.access import origin_of


def refusal(*arguments: str) -> str:
    """What a command says that must fail; on one line, without its frame."""
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code != 0
    if isinstance(done.exception, GgufMtpError):
        return str(done.exception)
    assert done.exit_code == 2, done.exception
    return " ".join(done.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("bench", "--depths", "1.5"), "--depths 1.5 is not a list of whole numbers"),
        (("bench", "--parallel", "1,1.5"), "--parallel 1,1.5 is not a list of whole numbers"),
        (("bench", "--temps", "x"), "--temps x is not a list of numbers"),
        (("bench", "--workloads", ""), "--workloads is an empty list"),
        (("bench", "--temps", ","), "--temps is an empty list"),
        (("worker", "--mem", "0"), "--mem 0 lends nothing"),
        (("worker", "-t", "99999999"), "less than or equal to 512"),
        (("convert", "x", "-t", "99999999"), "less than or equal to 512"),
        (("run", "-p", "x", "--logprobs", "3"), "--logprobs needs --json"),
        (("run", "-p", " "), "the prompt is empty"),
        (("serve", "--api-key", ""), "--api-key is empty"),
        (("serve", "--alias", ""), "--alias is empty"),
        (("serve", "--api-key-file", "/no/such"), "cannot read /no/such: No such file"),
        (("serve", "--api-key-file", os.devnull), "the first line of /dev/null is empty"),
        (("serve", "--api-key", "a", "--api-key-file", "b"), "cannot be combined"),
        (("run", "-p", "x", "--chat-template-file", "/no/such"), "cannot read /no/such: No such"),
        (("run", "-p", "x", "--chat-template", "a", "--chat-template-file", "b"), "be combined"),
        (("bench", "--draft-model", "x.gguf"), "--draft-model needs --draft model"),
        (("bench", "--draft", "mtp", "--draft-model", "x"), "--draft-model needs --draft model"),
    ],
)
def test_values_that_mean_nothing(arguments: tuple[str, ...], said: str) -> None:
    assert said in refusal(*arguments)


def test_a_result_is_not_measured_for_a_place_that_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    for place in (tmp_path, tmp_path / "no" / "x.json", model):
        assert f"--save {place} " in refusal("bench", str(model), "--save", str(place))
    assert model.read_bytes() == b"GGUF"
    monkeypatch.setattr(os, "access", lambda _, mode: mode != os.W_OK)
    assert "Permission denied" in refusal("bench", str(model), "--save", str(tmp_path / "x"))


def test_more_threads_than_ggml_knows() -> None:
    """With millions of them OpenMP ended the process, and gdb was asked for a stack."""
    assert LoadOptions(n_threads=512).n_threads == 512
    with pytest.raises(RequestError, match="count is 513, but ggml supports at most 512"):
        LoadOptions(n_threads=513)


def test_what_would_spoil_every_answer_is_said_at_the_start() -> None:
    for args, said in (
        (SamplingArgs(max_tokens=0), "-n is 0, but must be 1 or more, or -1"),
        (SamplingArgs(max_tokens=-5), "-n is -5"),
        (SamplingArgs(seed=-2), "--seed is -2, but must be 0 or more, or -1"),
        (SamplingArgs(logit_bias=["99+1"]), "logit_bias names token 99"),
    ):
        with pytest.raises(RequestError, match=said):
            args.over(SamplingParams(), 99)
    assert SamplingArgs(logit_bias=["98+1"]).over(SamplingParams(), 99).logit_bias == ((98, 1.0),)


def test_a_trace_takes_the_place_of_another_trace_only(tmp_path: Path) -> None:
    """It begins anew: of a model of the same name nothing would be left."""
    model, notes, trace = (tmp_path / name for name in ("model.gguf", "notes", "trace"))
    model.write_bytes(b"GGUF\3\0\0\0")
    notes.write_text("my notes\n")
    trace.write_text('{"gguf_mtp_trace":1}\n{"t":0}\n')
    for path in (model, notes):
        before = path.read_bytes()
        with (
            pytest.raises(RequestError, match=f"--trace {path} already exists and is not a trace"),
            open_files("off", path, goes_on=False),
        ):
            pass
        assert path.read_bytes() == before
    with (
        pytest.raises(RequestError, match=f"--log {model} already exists and is not a text file"),
        open_files(str(model), None, goes_on=False),
    ):
        pass
    assert model.read_bytes() == b"GGUF\3\0\0\0"
    with open_files(str(notes), trace, goes_on=False):
        pass
    assert (notes.read_text(), trace.read_text()) == ("my notes\n", "")


def test_an_endless_file_is_no_grammar() -> None:
    said = refusal("chat", "--server", "http://127.0.0.1:1", "--grammar-file", "/dev/zero")
    assert said == "/dev/zero has more than 1048576 characters"  # all that a grammar may have


def test_what_a_hub_s_library_tries_is_not_told_twice() -> None:
    """In a fresh interpreter: the library sets its own level when it is imported."""
    script = """
import logging
from gguf_mtp.cli.pull import say_it_ourselves
logging.basicConfig(level=logging.WARNING)
say_it_ourselves(quiet=False)
from huggingface_hub import HfApi
logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s [Retry 1/5].")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_empty_host_is_not_every_address() -> None:
    with pytest.raises(GgufMtpError, match=r"--host is empty; 0.0.0.0 listens on every address"):
        listen("", 0)


@pytest.mark.parametrize(
    ("page", "origin"),
    [
        ("http://localhost:3000", "http://localhost:3000"),
        ("http://localhost:3000/", "http://localhost:3000"),
        ("https://Chat.Example", "https://chat.example"),
        ("http://[::1]:8080", "http://[::1]:8080"),
        ("*", "*"),
        ("null", "null"),
    ],
)
def test_a_page_is_told_by_its_origin(page: str, origin: str) -> None:
    assert origin_of(page) == origin


@pytest.mark.parametrize(
    "page",
    ["", "foo", "localhost:3000", "http://", "http://x/chat", "http://x?y", "http://x:99999",
     "http://u@x", "http://[x"],
)  # fmt: skip
def test_what_no_browser_sends_is_no_origin(page: str) -> None:
    """It would be compared with every request's, and never be equal."""
    with pytest.raises(RequestError, match="is not a web origin"):
        origin_of(page)


def test_the_child_is_told_so_before_what_is_no_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gguf-mtp", "run", "--rpc", "a:1", "--", "-model.gguf"])
    assert command("--port", "0")[3:] == [
        *("run", "--rpc", "a:1", CHILD, "--port", "0", "--", "-model.gguf")
    ]


def test_a_folder_is_called_what_its_user_calls_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "0a1b2c").mkdir()
    (tmp_path / "V3").symlink_to(tmp_path / "0a1b2c")
    assert folder_name(tmp_path / "V3") == "V3"
    monkeypatch.chdir(tmp_path / "0a1b2c")
    assert folder_name(Path()) == "0a1b2c"
    assert folder_name(Path(os.pardir)) == tmp_path.name
