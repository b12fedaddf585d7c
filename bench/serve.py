"""Measures a server under load: concurrent clients, answers of mixed lengths, disconnects.

    python -m gguf_mtp.bench.serve [MODEL] [--clients 1,4,8,32] [--requests 16] [--json]
    python -m gguf_mtp.bench.serve --url http://127.0.0.1:8080/v1

Without `--url` it starts `gguf-mtp serve` on a free port and passes it the options after `--`.
Each client sends its requests one after another. Tokens per second are the total over all clients.
TTFT is the time to the first token, TPOT the time per token after it.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

from .client import Asked, Server, ask
from .workloads import questions_by_kind

LENGTHS = (8, 32, 128)
"""max_tokens of the requests, each as often."""
LEAVING = 0.1
"""The share of clients that close the connection within the first tokens."""
CENTILES = (50, 95, 99)


class ClientLoad(NamedTuple):
    """`n_clients` at once, each with `n_requests` requests, drawn with `seed`."""

    n_clients: int
    n_requests: int
    seed: int = 0


class Level(NamedTuple):
    """What one load gave; `seconds` is the wall time of all of it."""

    load: ClientLoad
    asked: Sequence[Asked]
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return sum(one.n_tokens for one in self.asked) / self.seconds

    @property
    def errors(self) -> list[str]:
        return [one.error for one in self.asked if one.error]


def measure(server: Server, load: ClientLoad) -> Level:
    questions = [q for kind in questions_by_kind().values() for q in kind]

    def client(index: int) -> list[Asked]:
        rng = random.Random(f"{load.seed} {load.n_clients} {index}")
        asked = []
        for _ in range(load.n_requests):
            question = " ".join(rng.sample(questions, rng.choice((1, 1, 4))))  # some are long
            body = {
                "messages": [{"role": "user", "content": question}],
                "max_tokens": rng.choice(LENGTHS),
                "seed": rng.randrange(1 << 30),
            }
            leaves = rng.random() < LEAVING
            asked.append(ask(server, body, rng.randint(1, 4) if leaves else None))
        return asked

    start = time.perf_counter()
    with ThreadPoolExecutor(load.n_clients) as pool:
        asked = [one for some in pool.map(client, range(load.n_clients)) for one in some]
    return Level(load, asked, time.perf_counter() - start)


def figures(level: Level) -> dict[str, Any]:
    """The figures of a level, times in milliseconds."""
    first = [one.first_s for one in level.asked if one.first_s is not None]
    each = [one.per_token_s for one in level.asked if one.per_token_s is not None]
    return {
        "clients": level.load.n_clients,
        "requests": len(level.asked),
        "left": sum(one.has_left for one in level.asked),
        "errors": level.errors,
        "tokens": sum(one.n_tokens for one in level.asked),
        "seconds": round(level.seconds, 3),
        "tokens_per_s": round(level.tokens_per_s, 1),
        "ttft_ms": centiles(first),
        "tpot_ms": centiles(each),
    }


def centiles(seconds: Sequence[float]) -> dict[str, float]:
    """The percentiles of `CENTILES`, in milliseconds; none of no values."""
    if not seconds:
        return {}
    if len(seconds) == 1:
        return {f"p{p}": round(1000 * seconds[0], 3) for p in CENTILES}
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {f"p{p}": round(1000 * cuts[p - 1], 3) for p in CENTILES}


def row(found: dict[str, Any]) -> str:
    times = (found[kind].get(f"p{p}") for kind in ("ttft_ms", "tpot_ms") for p in CENTILES)
    cells = " ".join(f"{'' if t is None else f'{t:.1f}':>9}" for t in times)
    return (
        f"{found['clients']:>7} {found['requests']:>8} {found['left']:>5} "
        f"{len(found['errors']):>6} {found['tokens_per_s']:>9.1f} {cells}"
    )


HEADER = (
    f"{'clients':>7} {'requests':>8} {'left':>5} {'errors':>6} {'tokens/s':>9} "
    + " ".join(f"{f'{kind} p{p}':>9}" for kind in ("TTFT", "TPOT") for p in CENTILES)
    + "   (ms)"
)


@contextmanager
def serving(model: str | None, options: Sequence[str]) -> Iterator[Server]:
    """A server process of our own. Raises `RuntimeError` when it does not start."""
    start = "from gguf_mtp.cli.app import main; main()"
    command = [sys.executable, "-c", start, "serve", *([model] if model else [])]
    command += ["--port", "0", "--log", "off", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            for line in process.stdout:
                if found := re.search(r"http://\S+/v1", line):
                    yield Server(found[0])
                    break
            else:
                raise RuntimeError("the server did not start")
        finally:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m gguf_mtp.bench.serve")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--url", help="address of a running server, ending in /v1")
    parser.add_argument("--api-key")
    parser.add_argument(
        "--clients", default="1,4,8,32", help="numbers of concurrent clients, comma-separated"
    )
    parser.add_argument("--requests", type=int, default=16, help="requests per client")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    ours, options = _split(sys.argv[1:])
    args = parser.parse_args(ours)
    loads = [ClientLoad(int(n), args.requests) for n in args.clients.split(",")]
    if args.url:
        _report(Server(args.url, args.api_key), loads, args.json)
        return
    with serving(args.model, options) as server:
        _report(server, loads, args.json)


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """What stands before and after the first `--`."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]


def _report(server: Server, loads: Sequence[ClientLoad], as_json: bool) -> None:
    measure(server, ClientLoad(1, 2, seed=1))  # the first requests read what later ones find cached
    levels = []
    if not as_json:
        print(HEADER)
    for load in loads:
        levels.append(figures(measure(server, load)))
        if not as_json:
            print(row(levels[-1]), flush=True)
            for error in sorted(set(levels[-1]["errors"])):
                print(f"        error: {error}")
    if as_json:
        print(json.dumps({"command": " ".join(sys.argv), "levels": levels}))


if __name__ == "__main__":
    main()
