"""Servers side by side: who is asked what, and what the figures say. The servers are fakes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from gguf_mtp.bench.peer import PeerPlan, ask, compare, rows


@contextmanager
def fake(per_token_s: float, ending: str = "") -> Iterator[tuple[str, list[dict[str, object]]]]:
    """A server that takes `per_token_s` for each token, and what it was asked."""
    asked: list[dict[str, object]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body)
            question = body["messages"][0]["content"]
            time.sleep(per_token_s * body["max_tokens"])
            message = {"content": question.upper() + ending}
            usage = {"completion_tokens": body["max_tokens"]}
            said = json.dumps({"choices": [{"message": message}], "usage": usage}).encode()
            self.send_response(404 if question == "no" else 200)
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *_: object) -> None:
            """Nothing is printed."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
        server.shutdown()


def test_speeds_and_equal_texts_are_to_the_first_server() -> None:
    questions = [f"q{i}" for i in range(8)]
    with fake(0.01) as (slow, of_slow), fake(0.004, ending="!") as (fast, of_fast):
        found = compare({"slow": slow, "fast": fast}, questions, PeerPlan(3, 2, 5))
    first, second = rows("facts", found)
    assert (first.server, first.speed, first.n_same, first.n_answers) == ("slow", 1.0, 6, 6)
    assert (second.server, second.n_same, second.n_answers) == ("fast", 0, 6)
    assert 1.3 < second.speed < 3.0
    assert 50 < first.tokens_per_s < 100
    assert of_slow == of_fast
    assert [one["messages"][0]["content"] for one in of_slow] == questions  # type: ignore[index]
    assert {(one["temperature"], one["max_tokens"]) for one in of_slow} == {(0, 5)}


def test_what_is_no_answer_is_said() -> None:
    with fake(0.0) as (url, _), pytest.raises(RuntimeError, match="answered 404"):
        ask(url, "no", 1)
