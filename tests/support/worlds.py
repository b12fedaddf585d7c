"""RPC workers on loopback, for tests: real second devices with a set amount of memory."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

from gguf_mtp.errors import LoadFailed
from gguf_mtp.placement import rpc_probe
from tests.support.processes import COMMAND
from tests.support.waiting import PATIENCE_S

MIB = 1 << 20


class Worker:
    """A `gguf-mtp worker` process on a free loopback port."""

    def __init__(self, memory: int, port: int = 0) -> None:
        command = [COMMAND, "worker", "--port", str(port), "--mem", str(memory), "--threads", "1"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.endpoint = line.split()[-1]
        self.wait()

    def wait(self) -> None:
        """Until it answers."""
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                rpc_probe.probe_worker(self.endpoint, timeout=2)
                return
            except LoadFailed:
                assert time.monotonic() < end, "the worker does not answer"
                time.sleep(0.05)

    def kill(self) -> None:
        """As a power cut would."""
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextmanager
def workers(*memory: int) -> Iterator[list[Worker]]:
    running: list[Worker] = []
    try:
        for n in memory:
            running.append(Worker(n))
        yield running
    finally:
        for worker in running:
            worker.kill()
            assert worker.process.stdout is not None
            worker.process.stdout.close()
