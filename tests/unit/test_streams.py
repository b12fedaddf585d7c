"""Standard streams that are closed, and names of files that are no text: a shell makes both."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gguf_mtp.demo import CHECKPOINT, demo_model

COMMAND = os.fsencode(Path(sys.executable).with_name("gguf-mtp"))


def shell(line: str) -> tuple[int, bytes]:
    """The exit code of a line in which `$0` is the command, and all that was printed."""
    done = subprocess.run(
        ["bash", "-c", line, COMMAND], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_one_that_nobody_reads_or_writes(closed: str) -> None:
    assert shell(f'"$0" inspect {closed}')[0] == 0
    code, printed = shell(f'"$0" inspect /no/where {closed}')
    assert code == 1
    said = b"error: cannot read /no/where: No such file or directory\n"
    assert printed == (b"" if "2>" in closed else said)


def test_no_file_gets_the_number_of_a_closed_stream() -> None:
    """llama.cpp writes its messages to number 2, whatever that is."""
    code = (
        "import os, sys; from gguf_mtp.cli.app import _open_what_is_closed as go; go();"
        "null = os.stat(os.devnull).st_rdev;"
        "open_to = {os.fstat(i).st_rdev for i in range(3)};"
        "sys.exit(open('/dev/zero').fileno() < 3 or open_to != {null})"
    )
    done = subprocess.run(["bash", "-c", f'"$0" -c "{code}" <&- >&- 2>&-', sys.executable])
    assert done.returncode == 0


def test_ctrl_c_before_the_command_is_there_shows_no_stack() -> None:
    code = (
        "import os, signal, sys\n"
        "class Loading:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'typer': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Loading())\n"
        "from gguf_mtp.cli.entry import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code, "-V"], capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")


@pytest.mark.native
def test_without_standard_input_there_is_nothing_to_answer() -> None:
    assert shell('"$0" chat -t 1 <&-') == (0, b"")


@pytest.mark.native
def test_a_name_that_is_no_text_is_a_file_like_others(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path)
    model, side, made = (folder + b"/" + name for name in (b"m\xe9.gguf", b"s\xe9", b"c\xe9.gguf"))
    shutil.copy(demo_model(), model)
    cut = b"note: the answer was cut off after 2 tokens (-n)\n"
    for said, arguments in (
        (cut, [b"run", model, b"-p", b"caf\xe9", b"-n", b"2", b"-t", b"1"]),
        (b"", [b"inspect", model]),
        (b"", [b"extract", model, b"-o", side, b"-q"]),
        (b"", [b"convert", os.fsencode(CHECKPOINT), b"-o", made, b"-q", b"--no-verify"]),
    ):
        done = subprocess.run([COMMAND, *arguments], capture_output=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, said), arguments
    named = [b"convert", os.fsencode(CHECKPOINT), b"-o", made, b"--force", b"--name", b"\xe9"]
    done = subprocess.run([COMMAND, *named], capture_output=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr == b"error: the name '\\udce9' is not UTF-8; give another with --name\n"
