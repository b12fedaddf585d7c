"""The load bench over a scripted engine, whose tokens are known."""

from __future__ import annotations

import json
import sys

import pytest

from gguf_mtp.bench import serve
from gguf_mtp.bench.client import Asked, Server, ask
from gguf_mtp.bench.serve import HEADER, ClientLoad, Level, centiles, figures, measure, row
from tests.server.test_server_live import wait_for
from tests.support.chat_formats import CHATML
from tests.support.scripted import Answer, ScriptedEngine
from tests.support.serving import served_of, serving

BODY = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.server
def test_a_request_is_counted_as_its_client_sees_it() -> None:
    engine = ScriptedEngine(lambda *_: Answer("one two three", chunk=4))
    with serving(engine, served_of(engine, CHATML)) as server:
        whole = ask(Server(f"{server.url}/v1"), BODY)
        left = ask(Server(f"{server.url}/v1"), BODY, leave_after=2)
        refused = ask(Server(f"{server.url}/v1"), BODY | {"n": -1})
    assert (whole.n_tokens, whole.has_left, whole.error) == (13, False, None)
    assert whole.first_s is not None
    assert 0 < whole.first_s < whole.seconds
    assert whole.per_token_s == pytest.approx((whole.seconds - whole.first_s) / 12)
    assert (left.n_tokens, left.has_left, left.error) == (8, True, None)
    assert left.per_token_s is None
    assert (refused.n_tokens, refused.error) == (0, "status 400")


@pytest.mark.server
def test_an_error_in_a_stream_and_a_server_that_is_not_there() -> None:
    failures = {3: RuntimeError("boom")}
    engine = ScriptedEngine(lambda *_: Answer("one two"), failures=failures)  # type: ignore[arg-type]
    with serving(engine, served_of(engine, CHATML)) as server:
        asked = ask(Server(f"{server.url}/v1"), BODY)
    assert asked.n_tokens == 3
    assert asked.error == "the request failed inside the server; see the server log"
    assert "Refused" in (ask(Server("http://127.0.0.1:1/v1"), BODY).error or "")


@pytest.mark.server
def test_a_load_is_asked_for_whole_and_can_be_repeated() -> None:
    bodies = []
    for _ in range(2):
        engine = ScriptedEngine(lambda *_: Answer("fine, " * 40), n_seq=4, n_ctx=5000)
        with serving(engine, served_of(engine, CHATML)) as server:
            level = measure(Server(f"{server.url}/v1"), ClientLoad(n_clients=3, n_requests=10))
            wait_for(lambda: server.worker.n_unfinished == 0)
        found = figures(level)
        assert (found["clients"], found["requests"], found["errors"]) == (3, 30, [])
        assert found["left"] == sum(one.has_left for one in level.asked) > 0
        assert found["tokens"] == sum(one.n_tokens for one in level.asked)
        assert {r.max_tokens for r in engine.requests} == {8, 32, 128}
        assert 0 < found["ttft_ms"]["p50"] <= found["ttft_ms"]["p99"]
        bodies.append(sorted((tuple(r.prompt), r.max_tokens) for r in engine.requests))
    assert bodies[0] == bodies[1]


def test_centiles() -> None:
    assert centiles([i / 1000 for i in range(101)]) == {"p50": 50.0, "p95": 95.0, "p99": 99.0}
    assert centiles([0.5]) == {"p50": 500.0, "p95": 500.0, "p99": 500.0}
    assert centiles([]) == {}


def test_a_row_stands_under_its_header() -> None:
    asked = [Asked(11, 0.1, 1.1), Asked(2, 0.3, 0.4, has_left=True), Asked(error="status 503")]
    line = row(figures(Level(ClientLoad(1, 3), asked, 2.0)))
    assert line.split()[:6] == ["1", "3", "1", "1", "6.5", "200.0"]
    assert line.split()[6:] == ["290.0", "298.0", "100.0", "100.0", "100.0"]
    assert len(line) == len(HEADER.removesuffix("   (ms)"))
    assert "TTFT p95" in HEADER


@pytest.mark.server
def test_the_command_prints_one_json_document(monkeypatch, capsys) -> None:
    engine = ScriptedEngine(lambda *_: Answer("fine"), n_seq=4, n_ctx=5000)
    with serving(engine, served_of(engine, CHATML)) as server:
        arguments = ["--url", f"{server.url}/v1", "--clients", "1,2", "--requests", "2", "--json"]
        monkeypatch.setattr(sys, "argv", ["serve", *arguments])
        serve.main()
    found = json.loads(capsys.readouterr().out)
    assert [level["requests"] for level in found["levels"]] == [2, 4]
