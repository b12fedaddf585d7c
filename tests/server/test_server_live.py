"""Clients that come together and clients that leave, on real connections."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.support.chat_formats import CHATML
from tests.support.scripted import Answer, ScriptedEngine
from tests.support.serving import Server, parse_event, served_of, serving
from tests.support.waiting import wait_for

pytestmark = pytest.mark.server

ASK = {"messages": [{"role": "user", "content": "Hi"}]}


def held(script: Callable[[str, int], Answer], **options) -> ScriptedEngine:
    """An engine that makes a step only when the test lets it."""
    engine = ScriptedEngine(script, **options)
    engine.steps = threading.Semaphore(0)
    return engine


def go_on(server: Server, engine: ScriptedEngine, n_unfinished: int) -> None:
    """Lets the engine make steps, slowly, until so many requests are left."""

    def is_reached() -> bool:
        engine.steps.release()
        time.sleep(0.01)
        return server.worker.n_unfinished == n_unfinished

    wait_for(is_reached)


def leave(server: Server, engine: ScriptedEngine, body: dict, n_steps: int) -> None:
    """A client that asks, and hangs up when the engine has made `n_steps` steps."""
    content = json.dumps(ASK | body)
    head = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    with socket.create_connection((server.client.base_url.host, server.client.base_url.port)) as s:
        s.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n\r\n{content}".encode())
        wait_for(lambda: server.worker.n_unfinished)
        for _ in range(n_steps):
            engine.steps.release()
        wait_for(lambda: engine.n_steps == n_steps)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n_steps", [0, 1, 4])  # before the prompt, between two pieces, later
def test_a_client_that_leaves_ends_its_request(stream: bool, n_steps: int) -> None:
    engine = held(lambda *_: Answer("x" * 400, chunk=1, n_prefill=3))
    with serving(engine, served_of(engine, CHATML)) as server:
        leave(server, engine, {"stream": stream}, n_steps)
        go_on(server, engine, n_unfinished=0)
        assert engine.cancelled == [1]
        assert engine.n_steps < 100  # its text would have taken 400


def test_a_client_that_leaves_the_queue_is_never_served() -> None:
    engine = held(lambda *_: Answer("x" * 400, chunk=1), n_seq=1)
    with serving(engine, served_of(engine, CHATML)) as server, ThreadPoolExecutor() as pool:
        first = pool.submit(server.chat)
        wait_for(lambda: server.worker.n_unfinished == 1)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/chat/completions", json=ASK, timeout=0.2, trust_env=False)
        go_on(server, engine, n_unfinished=1)
        engine.steps.release(1000)
        assert first.result(10).status_code == 200
    assert engine.cancelled == [2]


def test_all_choices_end_when_the_client_leaves() -> None:
    engine = held(lambda *_: Answer("x" * 400, chunk=1), n_seq=2)
    with serving(engine, served_of(engine, CHATML)) as server:
        leave(server, engine, {"n": 4, "stream": True}, 3)
        go_on(server, engine, n_unfinished=0)
        assert engine.n_steps < 100


def test_many_clients_at_once_get_their_own_answers() -> None:
    def script(prompt: str, _: int) -> Answer:
        return Answer(prompt.split("user\n")[1].split("<|im_end|>")[0] * 3, chunk=2)

    engine = ScriptedEngine(script, n_seq=3)
    with serving(engine, served_of(engine, CHATML), n_queue=50) as server:

        def ask(i: int) -> str:
            messages = [{"role": "user", "content": f"client {i}, "}]
            if i % 2:
                return server.answer(messages=messages)["choices"][0]["message"]["content"]
            events = server.events(messages=messages)
            deltas = [e["choices"][0]["delta"] for e in events[:-1]]
            return "".join(delta.get("content", "") for delta in deltas)

        with ThreadPoolExecutor(20) as pool:
            texts = list(pool.map(ask, range(40)))
    assert texts == [f"client {i}, " * 3 for i in range(40)]


def test_text_arrives_while_the_engine_is_still_at_work() -> None:
    engine = held(lambda *_: Answer("one two three", chunk=4))
    with serving(engine, served_of(engine, CHATML)) as server:
        body = ASK | {"stream": True}
        with server.client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()
            engine.steps.release(2)
            seen = []
            for line in lines:
                if line:
                    seen.append(parse_event(line)["choices"][0]["delta"].get("content"))
                if seen == ["", "one "]:
                    break
            assert engine.n_steps == 2
            engine.steps.release(100)
            assert [line for line in lines if line][-1] == "data: [DONE]"


def test_stopping_the_worker_ends_streams_with_an_error_event() -> None:
    engine = held(lambda *_: Answer("one two three", chunk=4))
    with serving(engine, served_of(engine, CHATML)) as server, ThreadPoolExecutor() as pool:
        stream, whole = pool.submit(server.events), pool.submit(server.chat)
        engine.steps.release(2)
        wait_for(lambda: engine.n_steps == 2)
        wait_for(lambda: server.worker.n_unfinished == 2)
        stopping = pool.submit(server.worker.stop, "the server is shutting down", 10)
        engine.steps.release(1)
        assert stopping.result(10)
        *_, error, done = stream.result(10)
        assert error["error"]["message"] == whole.result(10).json()["error"]["message"]
        assert (error["error"]["message"], done) == ("the server is shutting down", "[DONE]")
        assert whole.result().status_code == 503
        assert server.client.get("/health").status_code == 503
        assert server.chat().status_code == 503
