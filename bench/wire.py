"""Bytes on the wire per token: `python -m gguf_mtp.bench.wire [MODEL]`.

A worker on loopback lends memory; a proxy between it and the run counts bytes in both directions,
apart for loading, for the prompt, and for each decoded token. What is counted depends on shapes
only, not on the machine.
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import gguf_mtp

from .. import LoadOptions
from ..offload.options import PlacementOptions
from ..params import SamplingParams
from ..placement import rpc_probe

PROMPT = "The capital of France is"
GREEDY = SamplingParams(temperature=0)


@dataclass
class Counter:
    """Bytes that went to the worker and came from it."""

    sent: int = 0
    received: int = 0


class Proxy:
    """Listens on loopback and passes every connection on to `endpoint`, one after the other."""

    def __init__(self, endpoint: str) -> None:
        self.count = Counter()
        self._target = endpoint.rpartition(":")
        self._server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            client, _ = self._server.accept()
            with (
                client,
                socket.create_connection((self._target[0], int(self._target[2]))) as worker,
            ):
                self._pass_on(client, worker)

    def _pass_on(self, client: socket.socket, worker: socket.socket) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(client, selectors.EVENT_READ, worker)
            selector.register(worker, selectors.EVENT_READ, client)
            while True:
                for key, _ in selector.select():
                    data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                    if not data:
                        return
                    key.data.sendall(data)
                    if key.data is worker:
                        self.count.sent += len(data)
                    else:
                        self.count.received += len(data)


def measure(path: Path, endpoint: str, placement: PlacementOptions, depth: int) -> dict[str, float]:
    """Kilobytes a decoded token, plain or at a fixed depth, and megabytes of loading."""
    proxy = Proxy(endpoint)
    placement = replace(placement, rpc=(proxy.endpoint,), margin=0)
    options = LoadOptions(n_ctx=512, placement=placement, draft_min=depth, draft_max=depth)
    options = options if depth else replace(options, draft="off")
    with gguf_mtp.load(path, options) as session:
        count = proxy.count
        loading = count.sent
        for _ in session.complete(PROMPT, GREEDY, 8):  # graphs are stored with the worker
            pass
        sizes = []
        for i, piece in enumerate(session.complete(PROMPT + " what?", GREEDY, 64)):
            if i < 2:  # the prompt was read, and a round's graph stored with the worker
                sent, received = count.sent, count.received
            else:
                sizes.append(len(piece.tokens))
    n = max(sum(sizes), 1)
    return {
        "loading_mb": round(loading / 1e6, 1),
        "sent_kb_per_token": round((count.sent - sent) / n / 1e3, 2),
        "received_kb_per_token": round((count.received - received) / n / 1e3, 2),
        "tokens_per_round": round(n / max(len(sizes), 1), 2),
    }


WAYS = {
    "all layers": PlacementOptions(),
    "half the layers": PlacementOptions(n_gpu_layers=4),
    "experts on the CPU": PlacementOptions(cpu_moe=-1),
    "MTP block alone": PlacementOptions(n_gpu_layers=2),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", type=Path)
    path = parser.parse_args().model
    if path is None:
        from ..demo import demo_model

        path = demo_model()
    program = "from gguf_mtp.cli.app import main; main()"
    worker = subprocess.Popen(
        [sys.executable, "-c", program, "worker", "--port", "0", "--threads", "1"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert worker.stdout is not None
        endpoint = worker.stdout.readline().split()[-1]
        threading.Thread(target=worker.stdout.read, daemon=True).start()
        while True:
            try:
                rpc_probe.probe_worker(endpoint)
                break
            except gguf_mtp.GgufMtpError:
                pass
        found = {
            f"{name}, depth {depth}": measure(path, endpoint, placement, depth)
            for name, placement in WAYS.items()
            for depth in (0, 2)
        }
    finally:
        worker.kill()
    for name, row in found.items():
        print(f"{name:32}" + "".join(f"  {key} {value}" for key, value in row.items()))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
