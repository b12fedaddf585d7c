"""`gguf-mtp serve` as a process on a free port."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

COMMAND = Path(sys.executable).with_name("gguf-mtp")


class Process:
    """A running `gguf-mtp serve` on a free port."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [COMMAND, "serve", "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | (env or {}),
        )
        assert self.process.stdout
        lines: queue.Queue[str] = queue.Queue()
        self.greeting: list[str] = []

        def read() -> None:
            for line in self.process.stdout or ():
                lines.put(line)
            lines.put("")

        self._reader = threading.Thread(target=read)
        self._reader.start()
        while not self.greeting or "listening" not in self.greeting[-1]:
            line = lines.get(timeout=120)
            assert line, self.stop()
            self.greeting.append(line.rstrip())
        found = re.search(r"http://\S+/v1", self.greeting[-1])
        assert found
        self.url = found[0]

    def stop(self, number: int = signal.SIGTERM) -> str:
        """Ends it; what it wrote to standard error."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        assert self.process.stderr
        errors = self.process.stderr.read()
        self.process.wait(30)
        self._reader.join(10)
        for stream in (self.process.stdout, self.process.stderr):
            if stream:
                stream.close()
        return errors


@contextmanager
def process(*arguments: str, env: dict[str, str] | None = None) -> Iterator[Process]:
    running = Process(*arguments, env=env)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.kill()
            running.stop()
