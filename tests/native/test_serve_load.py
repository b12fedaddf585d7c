"""A day of load in minutes: two thousand requests, of which many are left and some are wrong.

Afterwards everything is as it was: memory, slots, cells, and what the model answers.
"""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.test_serve_watch import samples
from tests.support.processes import Process, process

pytestmark = [pytest.mark.native, pytest.mark.slow]

N_CLIENTS, N_WARM, N_ALL = 8, 200, 2000
LEAVING, WRONG, SAMPLED = 0.20, 0.05, 0.01
N_CTX, N_SLOTS = 512, 3
WRONG_BODIES: list[dict[str, Any]] = [
    {"messages": []},
    {"messages": [{"role": "user", "content": "x"}], "temperature": -1},
    {"messages": [{"role": "user", "content": "x"}], "n": 1000},
    {"messages": [{"role": "user", "content": "word " * 2000}]},
    {"messages": "x"},
]


@dataclass
class Day:
    """What clients saw: the statuses, and some of the texts with what they answer."""

    statuses: dict[int, int] = field(default_factory=dict)
    n_left: int = 0
    texts: list[tuple[dict[str, Any], str]] = field(default_factory=list)

    def __iadd__(self, other: Day) -> Day:
        for status, n in other.statuses.items():
            self.statuses[status] = self.statuses.get(status, 0) + n
        self.n_left += other.n_left
        self.texts += other.texts
        return self


def questions() -> list[str]:
    path = Path(__file__).parents[2] / "bench" / "prompts" / "held_out_by_kind.json"
    return [q for kind in json.loads(path.read_text(encoding="utf-8")).values() for q in kind]


def ask(http: httpx.Client, body: dict[str, Any], stream: bool) -> tuple[int, str]:
    response = http.post("/v1/chat/completions", json=body | {"stream": stream})
    if response.status_code != 200:
        return response.status_code, response.json()["error"]["message"]
    if not stream:
        return 200, response.json()["choices"][0]["message"]["content"]
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
    return 200, "".join(delta.get("content") or "" for delta in deltas)


def client(url: str, seed: int, n_requests: int) -> Day:
    rng, day, asked = random.Random(seed), Day(), questions()
    with httpx.Client(base_url=url, timeout=120, trust_env=False) as http:
        for _ in range(n_requests):
            kind = rng.random()
            body = {
                "messages": [{"role": "user", "content": rng.choice(asked)}],
                "max_tokens": rng.choice((4, 16, 48)),
            }
            if kind < LEAVING:
                leave(http, body, rng)
                day.n_left += 1
                continue
            wrong = kind < LEAVING + WRONG
            status, text = ask(
                http, rng.choice(WRONG_BODIES) if wrong else body, rng.random() < 0.5
            )
            assert status == (400 if wrong else 200), text
            day.statuses[status] = day.statuses.get(status, 0) + 1
            if not wrong and rng.random() < SAMPLED:
                day.texts.append((body, text))
    return day


def leave(http: httpx.Client, body: dict[str, Any], rng: random.Random) -> None:
    """Before the answer, or after a few of its pieces."""
    body = body | {"stream": True, "max_tokens": 400}
    try:
        with http.stream("POST", "/v1/chat/completions", json=body, timeout=60) as response:
            assert response.status_code == 200
            for _, _ in zip(range(rng.randint(0, 8)), response.iter_raw(1), strict=False):
                pass
    except httpx.RemoteProtocolError:
        pytest.fail("the server closed a connection")


def spend(url: str, n_requests: int, seed: int) -> Day:
    whole = Day()
    with ThreadPoolExecutor(N_CLIENTS) as pool:
        days = [
            pool.submit(client, url, seed + i, n_requests // N_CLIENTS) for i in range(N_CLIENTS)
        ]
        for day in days:
            whole += day.result()
    return whole


def when_idle(http: httpx.Client) -> dict[str, float]:
    end = time.monotonic() + 60
    while True:
        found = samples(http.get("/metrics").text)
        if found["num_requests_running"] == found["num_requests_waiting"] == 0:
            return found
        assert time.monotonic() < end, "requests of clients that left are still running"
        time.sleep(0.05)


def resident(running: Process) -> int:
    """Bytes of memory that the process holds."""
    status = Path(f"/proc/{running.process.pid}/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) << 10


def test_two_thousand_requests_change_nothing() -> None:
    options = ("--strict", "--draft-min", "2", "--draft-max", "2", "--temp", "0", "--log", "off")
    size = ("-c", str(N_CTX), "--parallel", str(N_SLOTS), "--queue", "200")
    with process(*options, *size, env={"MALLOC_ARENA_MAX": "2"}) as running:
        base = running.url.removesuffix("/v1")
        with httpx.Client(base_url=base, timeout=120, trust_env=False) as http:
            day = spend(base, N_WARM, seed=0)
            when_idle(http)
            warm = resident(running)
            day += spend(base, N_ALL - N_WARM, seed=1000)
            found = when_idle(http)
            grown = resident(running) / warm
            assert grown < 1.05, f"{warm >> 20} MB became {grown:.3f} times as much"

            n_answered = sum(day.statuses.values())
            assert n_answered + day.n_left == N_ALL
            assert 0.15 * N_ALL < day.n_left < 0.25 * N_ALL
            assert found["http_responses_total,400"] == day.statuses[400] > 0.03 * N_ALL
            codes = {name.split(",")[1] for name in found if name.startswith("http_responses")}
            assert codes <= {"200", "400", "499"}
            assert found.get("answers_total,error", 0) == 0
            assert found["answers_total,cancelled"] > 0

            check_that_all_cells_can_be_used(http)
            assert len(day.texts) > 5
            for body, text in day.texts:  # alone now
                assert ask(http, body, stream=False) == (200, text)
        assert running.stop() == ""
        assert running.process.returncode == 0


def check_that_all_cells_can_be_used(http: httpx.Client) -> None:
    """As many prompts at once as there are slots, each as long as the context, sharing nothing."""

    def fill(first: int) -> int:
        prompt = [first + i % 97 for i in range(N_CTX - 8)]
        body = {"prompt": prompt, "max_tokens": 7, "temperature": 0}
        response = http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return int(response.json()["usage"]["prompt_tokens"])

    with ThreadPoolExecutor(N_SLOTS) as pool:
        assert list(pool.map(fill, (500, 700, 900))) == [N_CTX - 8] * N_SLOTS
