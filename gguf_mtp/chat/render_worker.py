"""Chat templates rendered in a process of their own: `python -m gguf_mtp.chat.render_worker`.

A template is a program from a stranger, and jinja2's sandbox bounds neither its time nor its
memory. So a child renders: one that takes too long is ended, one that takes too much memory fails,
and the next rendering starts another. A line of JSON in, a line of JSON out.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

from gguf_mtp.child import bound_memory, start_module
from gguf_mtp.errors import RequestError

__all__ = ["SECONDS", "render_apart"]

SECONDS = 5.0
"""For one rendering; those of 10,000 messages take less than one."""
START_S = 30.0
"""For the process to start on a busy machine."""
MEMORY = 1 << 30
MOST_CHARS = 1 << 26
_READY, _MODULE = b"ready\n", "gguf_mtp.chat.render_worker"


class _Worker:
    """The child, started when it is first needed. One rendering at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._owner = 0

    def ask(self, line: bytes) -> bytes:
        """Raises `RequestError` when the child does not answer."""
        with self._lock:
            child = self._ready()
            assert child.stdin is not None
            try:
                child.stdin.write(line)
                child.stdin.flush()
                answer = self._lines.get(timeout=SECONDS)
            except queue.Empty:
                self.end()
                raise RequestError(
                    f"the model's chat template does not end within {SECONDS:.0f} s; "
                    "--chat-template takes another"
                ) from None
            except OSError:
                answer = b""
            if not answer:
                self.end()
                raise RequestError(
                    "the model's chat template needs too much memory; --chat-template takes another"
                )
            return answer

    def end(self) -> None:
        child, self._child = self._child, None
        if child is not None and self._owner == os.getpid():
            child.kill()
            child.wait()
            assert child.stdin is not None
            with suppress(OSError):  # what was not yet sent
                child.stdin.close()

    def _ready(self) -> subprocess.Popen[bytes]:
        child = self._child
        # A process that was forked from ours has its own.
        if child is not None and self._owner == os.getpid() and child.poll() is None:
            return child
        child = self._child = start_module(_MODULE)
        self._owner, self._lines = os.getpid(), queue.SimpleQueue()
        threading.Thread(target=_read, args=(child, self._lines), daemon=True).start()
        try:
            if self._lines.get(timeout=START_S) == _READY:
                return child
        except queue.Empty:
            pass
        self.end()
        raise RequestError("the process that renders chat templates does not start")


def _read(child: subprocess.Popen[bytes], lines: queue.SimpleQueue[bytes]) -> None:
    """Its lines as they come; an empty one at the end."""
    assert child.stdout is not None
    with child.stdout as out:
        for line in iter(out.readline, b""):
            lines.put(line)
    lines.put(b"")


_worker = _Worker()
atexit.register(_worker.end)


def render_apart(request: dict[str, Any]) -> str:
    """What `template.render_here` returns for the arguments in `request`, from the child.

    Raises `RequestError`: what it raises, or that it took too long or too much memory.
    """
    try:
        line = json.dumps(request).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"messages, tools and variables must be JSON: {error}") from None
    answer = json.loads(_worker.ask(line))
    if "error" in answer:
        raise RequestError(answer["error"])
    return str(answer["text"])


def _serve() -> None:
    from gguf_mtp.chat.template import render_here

    bound_memory("RLIMIT_AS", MEMORY)
    out = sys.stdout.buffer
    out.write(_READY)
    out.flush()
    for line in sys.stdin.buffer:
        try:
            text = render_here(**json.loads(line))
            if len(text) > MOST_CHARS:
                raise RequestError(
                    f"the model's chat template makes a text of {len(text)} characters"
                )
            answer = {"text": text}
        except RequestError as error:
            answer = {"error": str(error)}
        out.write(json.dumps(answer).encode() + b"\n")
        out.flush()


if __name__ == "__main__":
    _serve()
