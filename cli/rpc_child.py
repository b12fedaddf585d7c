"""Running on other machines' devices: the engine in a child process, this one in front of it.

ggml ends the process when a worker is lost. So with `--rpc` the command runs once more as a child;
when that dies, this process says which worker was lost. It knows no model and loads no llama.cpp.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO

__all__ = [
    "answers",
    "command",
    "end_with_parent",
    "environment",
    "forward",
    "is_abort",
    "run_in_child",
    "what_was_lost",
]

CHILD = "--rpc-child"
"""The hidden option that tells a command to run the engine itself."""

_ABORT = re.compile(
    r"ggml-rpc|Remote RPC server|(recv|send) failed|RPC handshake|Failed to connect"
)


def command(*more: str) -> list[str]:
    """This command line once more, as the child's. Of an option given twice the last one counts."""
    program = "from gguf_mtp.cli.app import main; main()"
    own = sys.argv[1:]
    end = own.index("--") if "--" in own else len(own)  # behind it nothing is an option
    return [sys.executable, "-c", program, *own[:end], CHILD, *more, *own[end:]]


def environment() -> dict[str, str]:
    """Ours, without ggml's habit of calling a debugger when it aborts."""
    return os.environ | {"GGML_NO_BACKTRACE": "1"}


def run_in_child(endpoints: Sequence[str]) -> int:
    """Runs this command in a child that has the terminal; the exit code.

    Raises `LoadFailed` in one sentence when ggml ended it because a worker was lost.
    """
    from ..errors import LoadFailed

    child = subprocess.Popen(command(), stderr=subprocess.PIPE, text=True, env=environment())
    held = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the child takes Ctrl+C
    try:
        assert child.stderr is not None
        forward(child.stderr, lambda line: print(line, end="", file=sys.stderr, flush=True))
        code = child.wait()
    finally:
        signal.signal(signal.SIGINT, held)
    if code < 0:
        raise LoadFailed(what_was_lost(endpoints, -code))
    return code


def end_with_parent() -> None:
    """In a child whose standard input is a pipe from its parent: ends as a signal would when the
    parent is gone, however that died."""

    def wait() -> None:
        while os.read(0, 4096):  # not sys.stdin, whose lock would be missed at the end
            pass
        while True:  # one that comes while the server sets up its handlers is lost
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)

    threading.Thread(target=wait, name="parent", daemon=True).start()


def forward(lines: IO[str], show: Callable[[str], object]) -> None:
    """Passes lines on until ggml aborts; what it prints then is for its developers."""
    for line in lines:
        if is_abort(line):
            break
        show(line)
    for _ in lines:
        pass


def is_abort(line: str) -> bool:
    """Whether ggml's RPC client says that it is about to end the process."""
    return bool(_ABORT.search(line))


def what_was_lost(endpoints: Sequence[str], number: int) -> str:
    """A sentence: the workers that do not answer any more, or the signal that ended the child."""
    lost = [endpoint for endpoint in endpoints if not answers(endpoint)]
    if lost:
        which = (
            f"worker at {lost[0]} was" if len(lost) == 1 else f"workers at {', '.join(lost)} were"
        )
        return f"the {which} lost, and the answer with it"
    return f"signal {number} ended the engine's process; every worker still answers"


def answers(endpoint: str) -> bool:
    from ..errors import LoadFailed
    from ..placement.rpc_probe import probe_worker

    try:
        probe_worker(endpoint, timeout=2)
    except LoadFailed:
        return False
    return True
