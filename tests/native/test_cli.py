"""The commands as a user runs them: real processes, the demo model, and bad input."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from gguf_mtp.demo import CHECKPOINT, demo_model
from tests.support.gguf_files import header, value

pytestmark = pytest.mark.native

COMMAND = Path(sys.executable).with_name("gguf-mtp")


def gguf_mtp(*arguments: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, *map(str, arguments)], input=stdin, capture_output=True, text=True, timeout=120
    )


def refused(*arguments: str | Path, code: int = 1) -> str:
    """Runs a command that must fail: one sentence on stderr, nothing else. Returns it."""
    done = gguf_mtp(*arguments)
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_chat_in_a_pipe_prints_answers_only() -> None:
    """What a command asks for is told on standard error."""
    done = gguf_mtp("chat", "--temp", "0", stdin="What is the capital of France?\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "The capital of France is Paris.\n"
    done = gguf_mtp("chat", "--temp", "0", stdin="What is the capital of France?\n/stats\n")
    assert done.stdout == "The capital of France is Paris.\n"
    assert done.stderr.startswith("prompt  10 tokens read")


def test_a_conversation_outgrows_the_context_and_goes_on() -> None:
    """The oldest exchanges are forgotten; with --context-full stop it is said how to go on."""
    questions = "".join(f"What is the capital of {c}?\n" for c in ("France", "Japan", "Italy") * 4)
    done = gguf_mtp("chat", "--temp", "0", "-c", "64", stdin=questions)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("The capital of") == 12
    done = gguf_mtp("chat", "--temp", "0", "-c", "64", "--context-full", "stop", stdin=questions)
    assert "; /clear starts a new conversation" in done.stderr
    assert 2 < done.stdout.count("The capital of") < 12
    cut = gguf_mtp("run", "--temp", "0", "-p", "What is the capital of France?", "-n", "3")
    assert cut.stderr == "note: the answer was cut off after 3 tokens (-n)\n"


def test_run_gives_the_same_text_with_and_without_drafts() -> None:
    question = ("-p", "What is the capital of Japan?", "--temp", "0", "--strict", "--json")
    plain, drafted = (
        json.loads(gguf_mtp("run", *question, *options).stdout)
        for options in (("--draft", "off"), ("--draft-max", "2", "--draft-min", "2"))
    )
    assert plain["text"] == drafted["text"] == "The capital of Japan is Tokyo."
    assert plain["tokens"] == drafted["tokens"]
    assert plain["finish_reason"] == drafted["finish_reason"] == "stop"
    assert plain["draft"]["drafted"] == 0
    draft = drafted["draft"]
    assert draft["rounds"] < plain["draft"]["rounds"]
    assert draft["acceptance_rate"] == round(draft["accepted"] / draft["drafted"], 4)
    assert sum(draft["accepted_per_position"]) == draft["accepted"] > 0
    timings = drafted["timings"]
    assert timings["decode_tokens"] == len(drafted["tokens"])
    assert timings["prefill_tokens"] > 0
    assert timings["tokens_per_s"] > 0


def test_run_stops_at_max_tokens_and_repeats_with_a_seed() -> None:
    question = ("run", "-p", "Hello", "-n", "7", "--temp", "0.9", "--seed", "5", "--json")
    fixed = ("--draft-max", "2", "--draft-min", "2")
    one, two = (json.loads(gguf_mtp(*question, *fixed).stdout) for _ in range(2))
    assert (len(one["tokens"]), one["finish_reason"]) == (7, "length")
    assert one["tokens"] == two["tokens"]


def test_run_raw_takes_the_prompt_as_it_stands() -> None:
    prompt = "<｜User｜>What is the capital of Italy?<｜Assistant｜>"
    done = gguf_mtp("run", "--raw", "--temp", "0", stdin=prompt)
    assert done.stdout == "The capital of Italy is Rome.\n"


def test_run_reads_files_and_standard_input_before_the_prompt(tmp_path: Path) -> None:
    """`cat notes.txt | gguf-mtp run -p "Summarise this"`."""
    (tmp_path / "a.txt").write_text("What is the capital\n")
    raw = ("run", "--raw", "--temp", "0", "-n", "1", "--json")
    piped = gguf_mtp(*raw, "-f", tmp_path / "a.txt", "-p", "of Italy?", stdin="Hello.\n\n")
    whole = "Hello.\n\nWhat is the capital\n\nof Italy?"
    expected = gguf_mtp(*raw, stdin=whole)
    assert json.loads(piped.stdout)["tokens"] == json.loads(expected.stdout)["tokens"]
    n_read = json.loads(piped.stdout)["timings"]["prefill_tokens"]
    assert n_read == json.loads(expected.stdout)["timings"]["prefill_tokens"] > 12
    missing = gguf_mtp("run", "-f", tmp_path / "none.txt", "-p", "x")
    assert (missing.returncode, missing.stderr.count("\n")) == (1, 1)
    assert f"cannot read {tmp_path}/none.txt" in missing.stderr


def test_an_existing_file_is_not_replaced(tmp_path: Path) -> None:
    """By convert, graft and extract, unless --force says so."""
    out = tmp_path / "m.gguf"
    made = gguf_mtp("convert", CHECKPOINT, "-o", out, "-q", "--no-verify")
    assert made.returncode == 0, made.stderr
    before = out.read_bytes()
    for arguments in (("convert", CHECKPOINT), ("extract", out)):
        done = gguf_mtp(*arguments, "-o", out, "-q")
        assert done.returncode == 1
        assert f"{out} exists; --force replaces it" in done.stderr
    assert out.read_bytes() == before
    again = gguf_mtp("convert", CHECKPOINT, "-o", out, "-q", "--no-verify", "--force")
    assert again.returncode == 0, again.stderr


def test_inspect_json() -> None:
    facts = json.loads(gguf_mtp("inspect", "--json").stdout)
    assert facts["architecture"] == "deepseek2"
    assert (facts["n_layer"], facts["n_mtp"], facts["can_draft"]) == (6, 1, True)


def test_a_model_without_mtp_runs_plain_with_one_warning(tmp_path: Path) -> None:
    out = tmp_path / "plain.gguf"
    assert gguf_mtp("convert", CHECKPOINT, "-o", out, "--mtp", "drop", "-q").returncode == 0
    done = gguf_mtp("run", out, "-p", "What is the capital of France?", "--temp", "0")
    assert done.stdout == "The capital of France is Paris.\n"
    assert done.stderr.startswith("warning: ")
    assert done.stderr.count("\n") == 1
    assert "no MTP block" in refused("run", out, "-p", "x", "--draft", "mtp")


def bad_files(folder: Path) -> dict[str, Path]:
    good = demo_model().read_bytes()
    contents = {
        "not a GGUF": b"hello, this is text" * 10,
        "empty": b"",
        "cut short": good[: len(good) // 2],
        "cut in the header": good[:1000],
        "random": bytes((i * 7919 + i // 251) % 256 for i in range(4096)),
        "newer": b"GGUF" + struct.pack("<I", 9) + good[8:],
        "no tensors": header({"general.architecture": value("deepseek2")}, []),
        "two NextN blocks": good.replace(
            b"nextn_predict_layers" + struct.pack("<II", 4, 1),
            b"nextn_predict_layers" + struct.pack("<II", 4, 2),
        ),
        "unsplit kv_b": good.replace(b"attn_k_b.weight", b"attn_kv_b.weigh"),
    }
    files = {}
    for name, data in contents.items():
        files[name] = folder / f"{name.replace(' ', '-')}.gguf"
        files[name].write_bytes(data)
    return files


def test_bad_files_are_one_sentence(tmp_path: Path) -> None:
    for path in bad_files(tmp_path).values():
        for command in (("run", "-p", "x", path), ("chat", path), ("inspect", path)):
            if command[0] == "inspect" and path.name.startswith(("two", "unsplit")):
                continue  # sound files that cannot draft or run; inspect may say so
            sentence = refused(*command)
            assert path.name in sentence
    assert "no-such.gguf" in refused("run", "-p", "x", tmp_path / "no-such.gguf")
    assert tmp_path.name in refused("run", "-p", "x", tmp_path)


def test_values_out_of_range_are_named() -> None:
    for options, expected in [
        (("--temp", "-1"), "temperature"),
        (("--top-p", "1.5"), "top_p"),
        (("--draft-min", "4", "--draft-max", "2"), "draft_min is 4"),
        (("-c", "-5"), "context size"),
        (("-c", "100000000"), "lower -c"),
        (("-n", "0"), "-n is 0"),
        (("-t", "-2"), "threads"),
    ]:
        assert expected in refused("run", "-p", "x", *options)


def test_a_prompt_longer_than_the_context_names_both() -> None:
    sentence = refused("run", "-c", "256", "-p", "word " * 400)
    assert "the context holds 256" in sentence


def test_usage_errors_exit_2() -> None:
    done = gguf_mtp("run", "--no-such-option")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def on_a_terminal(*arguments: str) -> str:
    """What a person sees, without escape codes: the command's output on a terminal of its own."""
    demo_model()  # what is tested here is not the first use
    terminal, other_end = pty.openpty()
    process = subprocess.Popen(
        [COMMAND, *arguments], stdin=other_end, stdout=other_end, stderr=other_end
    )
    os.close(other_end)
    seen = b""
    with contextlib.suppress(OSError):  # how Linux says that the other side is closed
        while data := os.read(terminal, 65536):
            seen += data
    os.close(terminal)
    assert process.wait() == 0
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen.decode()).replace("\r\n", "\n")


def test_a_terminal_shows_no_bar_for_a_model_that_is_there() -> None:
    shown = on_a_terminal("run", "--temp", "0", "-p", "What is the capital of Peru?")
    assert shown == "The capital of Peru is Lima.\n"


def test_doctor_finds_that_the_demo_drafts() -> None:
    done = gguf_mtp("doctor", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = {one["subject"]: one for one in json.loads(done.stdout)}
    assert list(found) == [
        "versions", "python", "system", "build", "processor", "memory", "devices", "rpc", "cache",
        "hub", "demo",
    ]  # fmt: skip
    assert not any(one["is_broken"] for one in found.values())
    assert re.fullmatch(r"\d+ tokens .*; [1-9]\d* of \d+ drafts accepted", found["demo"]["value"])
    assert "GB/s" in found["memory"]["value"]
    shown = gguf_mtp("doctor").stdout
    assert shown.startswith("versions    gguf-mtp ")
    assert "\ndemo        " in shown


def test_demo_shows_both_ways_and_their_ratio() -> None:
    done = gguf_mtp("demo", "--questions", "1")
    assert done.returncode == 0, done.stderr
    assert "\nWhat is a river?\n  without drafts, " in done.stdout
    plain, drafted = re.findall(r"drafts, \d+ tokens/s: (.+)", done.stdout)
    assert plain.startswith("A river is a")
    text = " ".join(done.stdout.split())
    same = f"Equal letter by letter: {int(plain == drafted)} of 1 answer."
    assert same in text
    [(accepted, n)] = re.findall(
        r"\(median of 1 answer\)\. The model accepted (\d+) of (\d+)", text
    )
    assert 0 < int(accepted) <= int(n)
