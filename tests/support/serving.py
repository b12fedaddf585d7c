"""A real server on loopback for tests: uvicorn in a thread, over a scripted engine or a model."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from gguf_mtp.answers.prepare import TextModel
from gguf_mtp.cli.http_server import listen
from gguf_mtp.engine.config import EngineLimits
from gguf_mtp.grammar.matching import Grammars
from gguf_mtp.params import SamplingParams
from gguf_mtp.server.app import ServerOptions, create_app
from gguf_mtp.server.engine_thread import EngineThread
from gguf_mtp.server.plan import Served
from gguf_mtp.session import Session
from tests.support.scripted import N_VOCAB, ByteVocab, ScriptedEngine
from tests.support.waiting import PATIENCE_S


@dataclass
class Server:
    """A running server, and a client for it."""

    url: str
    client: httpx.Client
    worker: EngineThread

    def chat(self, **body: Any) -> httpx.Response:
        body.setdefault("messages", [{"role": "user", "content": "Hi"}])
        return self.client.post("/v1/chat/completions", json=body)

    def answer(self, **body: Any) -> dict[str, Any]:
        response = self.chat(**body)
        assert response.status_code == 200, response.text
        return response.json()

    def events(self, path: str = "/v1/chat/completions", **body: Any) -> list[Any]:
        """A stream's events, comments as text; every line is checked to be whole."""
        if path.endswith("chat/completions"):
            body.setdefault("messages", [{"role": "user", "content": "Hi"}])
        response = self.client.post(path, json=body | {"stream": True})
        assert response.headers["content-type"].startswith("text/event-stream")
        blocks = response.content.decode("utf-8").split("\n\n")
        assert blocks.pop() == ""
        return [parse_event(block) for block in blocks]


def parse_event(block: str) -> Any:
    if block.startswith(":"):
        return block
    assert block.startswith("data: "), block
    data = block.removeprefix("data: ")
    return data if data == "[DONE]" else json.loads(data)


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a refusal, checked to be in OpenAI's shape and to tell no path."""
    assert response.status_code == status, response.text
    assert response.json().keys() == {"error"}
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert "/home" not in error["message"]
    assert __file__ not in error["message"]
    assert "\n" not in error["message"]
    return error


def served_of(engine: ScriptedEngine, template: str | None = None) -> Served:
    model = TextModel(
        vocab=ByteVocab(template),
        n_vocab=N_VOCAB,
        limits=engine.limits,
        grammars=Grammars(ByteVocab(template), N_VOCAB, engine.limits.end_tokens),
    )
    return Served("scripted", model, SamplingParams(), created=1_700_000_000)


def served_by(session: Session, template: str, limits: EngineLimits | None = None) -> Served:
    """A real model with another chat template."""
    model = dataclasses.replace(
        session.text,
        limits=limits or session.engine.limits,
        chat_template=template,
    )
    return Served("demo", model, SamplingParams(), created=0)


class Host:
    """One uvicorn for all tests, as starting and stopping one takes longer than most of them.

    `app` is what it serves at the moment.
    """

    def __init__(self) -> None:
        self.app: ASGIApp | None = None
        self._socket = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(self._serve, interface="asgi3", log_config=None)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],))
        self._thread.daemon = True
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive(), "the server did not start"
            time.sleep(0.005)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return
        assert self.app
        await self.app(scope, receive, send)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)
        self._socket.close()


@functools.cache
def host() -> Host:
    made = Host()
    atexit.register(made.stop)
    return made


@contextmanager
def serving(
    engine: Any, served: Served, options: ServerOptions | None = None, n_queue: int = 10
) -> Iterator[Server]:
    worker = EngineThread(engine, engine.limits.n_seq, n_queue)
    worker.start()
    host().app = create_app(worker, served, options or ServerOptions())
    try:
        with httpx.Client(
            base_url=host().url, timeout=PATIENCE_S, trust_env=False, verify=False
        ) as client:
            yield Server(host().url, client, worker)
    finally:
        steps = getattr(engine, "steps", None)
        if steps:
            steps.release(10_000)
        assert worker.stop("the test is over", PATIENCE_S)
