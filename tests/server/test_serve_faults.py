"""What can go wrong around a server: its engine dies, its clients neither read nor write."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import httpx
import pytest
import uvicorn

from gguf_mtp.cli.http_server import http_server, listen, run_until_signal
from gguf_mtp.server.access import Access
from gguf_mtp.server.app import ServerOptions, create_app
from gguf_mtp.server.engine_thread import EngineThread
from gguf_mtp.telemetry.metrics import Metrics
from tests.server.test_server_live import ASK
from tests.support.chat_formats import CHATML
from tests.support.scripted import Answer, ScriptedEngine
from tests.support.serving import error_of, served_of
from tests.support.waiting import PATIENCE_S, wait_for

pytestmark = pytest.mark.server


@dataclass
class Life:
    """A server that `gguf-mtp serve` would run, from start to end."""

    server: uvicorn.Server
    worker: EngineThread
    client: httpx.Client
    port: int
    has_died: bool | None = None

    def chat(self) -> httpx.Response:
        return self.client.post("/v1/chat/completions", json=ASK)

    def send(self, content: str, claimed: int | None = None) -> socket.socket:
        """A connection with a request on it that claims to be so long."""
        raw = socket.socket()
        raw.settimeout(PATIENCE_S)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)  # before it is connected
        raw.connect(("127.0.0.1", self.port))
        n_bytes = claimed or len(content)
        head = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {n_bytes}"
        raw.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n\r\n{content}".encode())
        return raw


@contextmanager
def living(
    engine: ScriptedEngine, grace: float = 0.2, access: Access | None = None
) -> Iterator[tuple[Life, threading.Thread]]:
    worker = EngineThread(engine, engine.limits.n_seq, 10)
    options = ServerOptions(access or Access(), metrics=Metrics())
    app = create_app(worker, served_of(engine, CHATML), options)
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S, trust_env=False
        ) as client:
            life = Life(http_server(app), worker, client, port)

            def live() -> None:
                life.has_died = asyncio.run(run_until_signal(life.server, listener, worker, grace))

            worker.start()
            thread = threading.Thread(target=live)
            thread.start()
            wait_for(lambda: life.server.started)
            try:
                yield life, thread
            finally:
                life.server.should_exit = True
                if engine.steps:
                    engine.steps.release(10_000)
                thread.join(PATIENCE_S)
                assert not thread.is_alive(), "the server does not end"
                assert worker.stop("the test is over", PATIENCE_S)


def test_when_the_engines_thread_dies_all_are_told_and_the_server_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failures = {3: SystemExit("killed")}
    engine = ScriptedEngine(lambda *_: Answer("x" * 400), failures=failures)  # type: ignore[arg-type]
    with living(engine, grace=5) as (life, thread), caplog.at_level(logging.ERROR):
        error = error_of(life.chat(), 503)
        assert error["message"] == "the engine has failed"
        thread.join(PATIENCE_S)
        assert life.has_died is True
        with pytest.raises(httpx.ConnectError):
            life.chat()
    assert "the engine's thread failed" in caplog.text


def test_a_server_that_is_told_to_end_has_not_died() -> None:
    with living(ScriptedEngine(lambda *_: Answer("fine"))) as (life, thread):
        assert life.chat().status_code == 200
        life.server.should_exit = True
        thread.join(PATIENCE_S)
        assert life.has_died is False


def test_a_reader_that_reads_nothing_holds_up_neither_others_nor_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its connection's buffers fill up; the engine goes on, and so do others' answers."""
    engine = ScriptedEngine(
        lambda _, n: Answer("x" * (1_000_000 if n == 0 else 5), chunk=2000), n_ctx=10**7
    )
    asking = json.dumps(ASK | {"stream": True, "return_token_ids": True})
    with living(engine, grace=0.2) as (life, thread), life.send(asking):
        wait_for(lambda: engine.requests)
        assert life.chat().json()["choices"][0]["message"]["content"] == "xxxxx"
        wait_for(lambda: life.worker.n_unfinished == 0)  # though nobody has read it
        life.server.should_exit = True
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert caplog.messages == []


@pytest.mark.parametrize("claimed", [100, 1_000_000])
def test_a_request_that_stops_in_the_middle_gets_a_408(claimed: int) -> None:
    access = Access(body_s=1.0)
    with living(ScriptedEngine(lambda *_: Answer("fine")), access=access) as (life, _):
        half = json.dumps(ASK)[:20]
        with life.send(half, claimed) as raw:
            assert life.chat().status_code == 200  # others are served meanwhile
            answer = b""
            while piece := raw.recv(4096):
                answer += piece
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        error = json.loads(body)["error"]
        assert error["message"] == "the rest of the request did not arrive within 1 s"
        assert life.worker.n_unfinished == 0


def test_a_slow_answer_is_not_a_slow_request() -> None:
    """The limit is for the request's body: an answer may take longer than it."""
    engine = ScriptedEngine(lambda *_: Answer("fine"))
    engine.steps = threading.Semaphore(0)
    with living(engine, access=Access(body_s=1.0)) as (life, _):
        threading.Timer(2.0, lambda: engine.steps.release(100)).start()  # type: ignore[union-attr]
        assert life.chat().status_code == 200


def test_connections_that_say_nothing_do_not_keep_the_server_from_ending(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = ScriptedEngine(lambda *_: Answer("fine"))
    with living(engine, grace=0.2) as (life, thread), ExitStack() as sockets:
        for _ in range(20):
            sockets.enter_context(socket.create_connection(("127.0.0.1", life.port)))
        half = [sockets.enter_context(life.send("{", 100)) for _ in range(20)]
        for raw in half[:5]:  # vanish without a word: reset, not closed
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            raw.close()
        assert life.chat().status_code == 200
        life.server.should_exit = True
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert caplog.messages == []


def test_a_client_whose_line_is_cut_ends_its_answer() -> None:
    engine = ScriptedEngine(lambda *_: Answer("x" * 5000, chunk=1), n_ctx=10**5)
    engine.steps = threading.Semaphore(0)
    with living(engine) as (life, _):
        raw = life.send(json.dumps(ASK | {"stream": True}))
        wait_for(lambda: engine.requests)
        engine.steps.release(3)
        assert raw.recv(10)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        raw.close()

        def is_over() -> bool:
            engine.steps.release()  # type: ignore[union-attr]
            time.sleep(0.005)
            return life.worker.n_unfinished == 0

        wait_for(is_over)
        assert engine.cancelled == [1]


def test_small_packets_are_not_held_back() -> None:
    """Without TCP_NODELAY every answer on an open connection, and every token, waits 40 ms."""
    asking = ASK | {"stream": True}
    with (
        living(ScriptedEngine(lambda *_: Answer("fine"))) as (life, _),
        life.client.stream("POST", "/v1/chat/completions", json=asking) as got,
    ):
        [connection] = life.server.server_state.connections
        raw = connection.transport.get_extra_info("socket")
        assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        got.read()
