"""Compares servers: how long whole requests take, as one client sees it.

    python -m gguf_mtp.bench.peer NAME=URL NAME=URL... [--workloads definitions,facts,code]

Start the servers first, all with the same model. Each URL ends in /v1; llama-server works too. The
servers take turns at every question, at temperature 0. `speed` is the first server's seconds over
this server's seconds: a ratio for each round, then the median. It compares equal texts, so it does
not depend on what a server counts as a token. The time of a request includes its prompt. The
benchmark cannot see how a server was built: build all servers with the same flags.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from typing import Any, NamedTuple

from .client import Server, posted
from .workloads import questions_by_kind


class Answer(NamedTuple):
    """One whole answer: its text, its tokens, and the seconds until the client had it."""

    text: str
    n_tokens: int
    seconds: float


class PeerRow(NamedTuple):
    """One server on one workload. `tokens_per_s` by its own count; `speed`: the first one's seconds
    over its own; `n_same` of `n_answers` texts are the first one's."""

    workload: str
    server: str
    tokens_per_s: float
    speed: float
    n_same: int
    n_answers: int


def ask(url: str, question: str, n_tokens: int) -> Answer:
    """Raises `RuntimeError` for anything but an answer."""
    body = {
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": n_tokens,
    }
    start = time.perf_counter()
    with posted(Server(url), body) as response:
        said = response.read()
    seconds = time.perf_counter() - start
    if response.status != 200:
        raise RuntimeError(f"{url} answered {response.status}: {said[:200]!r}")
    whole: dict[str, Any] = json.loads(said)
    message = whole["choices"][0]["message"]["content"] or ""
    return Answer(message, whole["usage"]["completion_tokens"], seconds)


class PeerPlan(NamedTuple):
    """Counted rounds (one more goes first), questions in each, and tokens of an answer."""

    n_rounds: int = 5
    n_prompts: int = 5
    n_tokens: int = 64


def compare(
    servers: Mapping[str, str], questions: Sequence[str], plan: PeerPlan
) -> dict[str, list[list[Answer]]]:
    """By server and counted round, the answers; other questions in every round until all were."""
    found: dict[str, list[list[Answer]]] = {name: [] for name in servers}
    for index in range(plan.n_rounds + 1):
        first = index * plan.n_prompts
        some = [questions[(first + i) % len(questions)] for i in range(plan.n_prompts)]
        for name in servers:
            found[name].append([])
        for question in some:
            for name, url in servers.items():
                found[name][-1].append(ask(url, question, plan.n_tokens))
    return {name: rounds[1:] for name, rounds in found.items()}


def rows(workload: str, found: Mapping[str, list[list[Answer]]]) -> list[PeerRow]:
    seconds = {name: [sum(a.seconds for a in r) for r in rs] for name, rs in found.items()}
    tokens = {name: [sum(a.n_tokens for a in r) for r in rs] for name, rs in found.items()}
    first = next(iter(found))
    texts = {name: [a.text for r in rounds for a in r] for name, rounds in found.items()}
    return [
        PeerRow(
            workload,
            name,
            statistics.median(n / s for n, s in zip(tokens[name], seconds[name], strict=True)),
            statistics.median(a / b for a, b in zip(seconds[first], seconds[name], strict=True)),
            sum(a == b for a, b in zip(texts[name], texts[first], strict=True)),
            len(texts[name]),
        )
        for name in found
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m gguf_mtp.bench.peer")
    parser.add_argument("servers", nargs="+", metavar="NAME=URL")
    parser.add_argument("--workloads", default="definitions,facts,code", help="comma-separated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=5, help="prompts per round")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    kinds = questions_by_kind()
    if any("=http" not in one for one in args.servers):
        parser.error("each server must be NAME=URL, and its URL must end in /v1")
    servers = dict(one.rsplit("=", 1) for one in args.servers)
    plan = PeerPlan(args.rounds, args.prompts, args.max_tokens)
    print(f"{'workload':<12} {'server':<24} {'tokens/s':>9} {'speed':>8} {'same text':>10}")
    for workload in args.workloads.split(","):
        if workload not in kinds:
            parser.error(f"unknown workload {workload!r}; use one of {', '.join(kinds)}")
        try:
            found = compare(servers, kinds[workload], plan)
        except (OSError, HTTPException, RuntimeError) as error:
            sys.exit(f"cannot measure a server: {error}")
        for row in rows(workload, found):
            print(
                f"{row.workload:<12} {row.server:<24} {row.tokens_per_s:>9.1f} "
                f"{row.speed:>8.3f} {row.n_same:>6}/{row.n_answers}",
                flush=True,
            )


if __name__ == "__main__":
    main()
