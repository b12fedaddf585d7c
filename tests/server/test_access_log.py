"""The record and the counts of every request, over a scripted engine on real connections."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import pytest

from gguf_mtp.server.access import Access
from gguf_mtp.server.app import ServerOptions
from gguf_mtp.telemetry.metrics import CONTENT_TYPE, Metrics
from tests.server.test_server_live import go_on, held, leave, wait_for
from tests.support.chat_formats import CHATML
from tests.support.scripted import Answer, ScriptedEngine
from tests.support.serving import Server, served_of, serving
from tests.unit.test_metrics import values

pytestmark = pytest.mark.server


@contextmanager
def journaled(
    engine: ScriptedEngine, **options: Any
) -> Iterator[tuple[Server, list[Mapping[str, Any]], Metrics]]:
    records: list[Mapping[str, Any]] = []
    metrics = Metrics()
    made = ServerOptions(metrics=metrics, write=records.append, **options)
    with serving(engine, served_of(engine, CHATML), made, n_queue=2) as server:
        yield server, records, metrics


def scraped(server: Server, path: str = "/metrics") -> dict[str, float]:
    response = server.client.get(path)
    assert response.headers["content-type"] == CONTENT_TYPE

    class Scraped:
        def text(self, _: object) -> bytes:
            return response.content

    return values(Scraped())  # type: ignore[arg-type]


@pytest.mark.parametrize("stream", [False, True])
def test_a_record_says_what_became_of_a_request(stream: bool) -> None:
    engine = ScriptedEngine(lambda *_: Answer("one two three", chunk=4))
    with journaled(engine) as (server, records, _):
        response = server.chat(stream=stream)
        wait_for(lambda: records)
    [record] = records
    assert record["id"] in response.text
    arrived = datetime.fromisoformat(record["time"].replace("Z", "+00:00"))
    assert abs((datetime.now(arrived.tzinfo) - arrived).total_seconds()) < 30
    assert 0 < record["first_token_s"] < record["seconds"] < 30
    n_prompt = len(engine.requests[0].prompt)
    expected = {
        "method": "POST",
        "path": "/v1/chat/completions",
        "status": 200,
        "stream": stream,
        "prompt_tokens": n_prompt,
        "cached_tokens": 0,
        "answer_tokens": 13,
        "finish": ["stop"],
        "prefill_s": 0.5,
        "decode_s": 1.0,
        "tokens_per_s": 13.0,
        "rounds": 4,
        "drafted": 9,
        "accepted": 9,
    }
    assert {name: record[name] for name in expected} == expected
    assert record.keys() == expected.keys() | {"id", "time", "seconds", "first_token_s"}


def test_choices_share_a_record() -> None:
    with journaled(ScriptedEngine(lambda _, n: Answer("x" * (n + 1)))) as (server, records, _):
        server.chat(n=2, max_tokens=1)
        wait_for(lambda: records)
    assert (records[0]["answer_tokens"], records[0]["finish"]) == (2, ["stop", "length"])


def test_what_is_refused_is_recorded_too() -> None:
    engine = ScriptedEngine(lambda *_: Answer("fine"))
    access = Access(api_key="key", max_body=1000)
    with journaled(engine, access=access) as (server, records, _):
        assert server.chat().status_code == 401
        server.client.headers["Authorization"] = "Bearer key"
        assert server.chat(messages=[{"role": "user", "content": "x" * 2000}]).status_code == 413
        assert server.chat(temperature=-1).status_code == 400
        assert server.client.get("/nowhere").status_code == 404
        assert server.client.get("/health").status_code == 200
        found = scraped(server)
    assert [(r["path"], r["status"]) for r in records] == [
        ("/v1/chat/completions", 401),
        ("/v1/chat/completions", 413),
        ("/v1/chat/completions", 400),
        ("/nowhere", 404),
    ]
    assert "temperature" in records[2]["error"]
    assert all("finish" not in record for record in records)
    assert {k: v for k, v in found.items() if "http_responses" in k} == {
        f"http_responses_total{{status={status}}}": 1 for status in (200, 400, 401, 404, 413)
    }


def test_metrics_need_the_key() -> None:
    engine = ScriptedEngine(lambda *_: Answer("fine"))
    with journaled(engine, access=Access(api_key="key")) as (server, _, _):
        assert server.client.get("/metrics").status_code == 401


def test_a_full_queue_is_an_error_in_the_record() -> None:
    engine = held(lambda *_: Answer("x"), n_seq=1)
    with journaled(engine) as (server, records, _):
        assert server.chat(n=4).status_code == 400
        with ThreadPoolExecutor() as pool:
            running = pool.submit(server.chat, n=3)
            wait_for(lambda: server.worker.n_unfinished == 3)
            assert server.chat().status_code == 503
            engine.steps.release(100)
            running.result(10)
        wait_for(lambda: len(records) == 3)
    assert [r["status"] for r in records] == [400, 503, 200]
    assert records[1]["error"].startswith("the server is busy")


@pytest.mark.parametrize(("stream", "status"), [(False, 499), (True, 200)])
def test_a_client_that_left_is_recorded_when_its_answer_has_ended(stream, status) -> None:
    engine = held(lambda *_: Answer("x" * 400, chunk=1, n_prefill=1))
    with journaled(engine) as (server, records, _):
        leave(server, engine, {"stream": stream}, 4)
        go_on(server, engine, n_unfinished=0)
        wait_for(lambda: records)
        found = scraped(server)
    [record] = records
    assert (record["status"], record["finish"]) == (status, ["cancelled"])
    assert record["answer_tokens"] < 100
    assert found["answers_total{finish=cancelled}"] == 1


def test_an_answer_that_failed_is_an_error() -> None:
    failures = {2: RuntimeError("boom")}
    engine = ScriptedEngine(lambda *_: Answer("one two"), failures=failures)  # type: ignore[arg-type]
    with journaled(engine) as (server, records, _):
        assert server.chat().status_code == 500
        wait_for(lambda: records)
        found = scraped(server)
    assert (records[0]["status"], records[0]["finish"]) == (500, ["error"])
    assert found["answers_total{finish=error}"] == 1


def test_running_and_waiting_answers() -> None:
    engine = held(lambda *_: Answer("one two"), n_seq=2)
    with journaled(engine) as (server, _, _), ThreadPoolExecutor() as pool:
        asking = [pool.submit(server.chat) for _ in range(3)]
        wait_for(lambda: server.worker.n_unfinished == 3)
        found = scraped(server)
        assert (found["num_requests_running"], found["num_requests_waiting"]) == (2, 1)
        assert found["kv_cells"] == 2 * 1000
        engine.steps.release(100)
        for one in asking:
            one.result(10)
        found = scraped(server)
        assert (found["num_requests_running"], found["num_requests_waiting"]) == (0, 0)
        assert found["answers_total{finish=stop}"] == 3
        assert found["time_to_first_token_seconds_count"] == 3
        assert found["time_per_output_token_seconds_count"] == 3
        assert found["answer_seconds_sum"] > found["time_to_first_token_seconds_sum"] > 0
