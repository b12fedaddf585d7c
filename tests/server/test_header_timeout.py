"""Clients that begin a request and never end it, on real sockets; and those that may wait."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from gguf_mtp.server.access import Access
from gguf_mtp.server.header_timeout import HeaderTimeoutProtocol
from tests.server.test_serve_faults import Life, living
from tests.server.test_server_live import ASK
from tests.support.scripted import Answer, ScriptedEngine
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.server

LIMIT_S = 1.0
EVERY_S = 0.05
"""Between two bytes of who sends one at a time: often enough for any time-out between bytes."""


@pytest.fixture
def life(monkeypatch: pytest.MonkeyPatch) -> Iterator[Life]:
    monkeypatch.setattr(HeaderTimeoutProtocol, "LIMIT_S", LIMIT_S)
    access = Access(body_s=LIMIT_S, body_rate=1000)
    with living(ScriptedEngine(lambda *_: Answer("fine")), access=access) as (life, _):
        yield life


def connect(life: Life) -> socket.socket:
    raw = socket.create_connection(("127.0.0.1", life.port))
    raw.settimeout(PATIENCE_S)
    return raw


def answers(raw: socket.socket) -> bytes:
    """Everything that comes until the server closes the connection."""
    seen = b""
    try:
        while piece := raw.recv(4096):
            seen += piece
    except ConnectionResetError:  # it closed with bytes of ours unread
        pass
    return seen


def trickle(raw: socket.socket, data: bytes) -> list[int]:
    """Sends `data` byte by byte, in the background, until nobody takes it; which ones it has."""
    sent: list[int] = []

    def send() -> None:
        try:
            for i in range(len(data)):
                raw.sendall(data[i : i + 1])
                sent.append(i)
                time.sleep(EVERY_S)
        except OSError:
            pass

    threading.Thread(target=send, daemon=True).start()
    return sent


def health(raw: socket.socket) -> bool:
    """Reads one whole answer to `GET`."""
    seen = b""
    while not seen.endswith(b"}"):
        seen += raw.recv(4096)
        assert seen
    return seen.startswith(b"HTTP/1.1 200 ") and seen.count(b'"unfinished"') == 1


def post(body: bytes, claimed: int) -> bytes:
    head = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {claimed}\r\n\r\n"
    return f"POST /v1/chat/completions HTTP/1.1\r\n{head}".encode() + body


GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


def is_408(answer: bytes) -> bool:
    head, _, body = answer.partition(b"\r\n\r\n")
    error = json.loads(body)["error"] if head.startswith(b"HTTP/1.1 408 ") else {}
    length = f"content-length: {len(body)}".encode()
    return error.keys() == {"message", "type", "param", "code"} and length in head.lower()


def test_who_says_nothing_is_hung_up_on(life: Life) -> None:
    with connect(life) as raw:
        start = time.monotonic()
        assert answers(raw) == b""
    assert time.monotonic() - start > LIMIT_S * 0.9


def test_half_a_header_gets_a_408(life: Life) -> None:
    with connect(life) as raw:
        raw.sendall(GET[:-2])
        assert life.chat().status_code == 200  # others are served meanwhile
        answer = answers(raw)
    assert is_408(answer)


def test_a_header_byte_by_byte_has_no_longer(life: Life) -> None:
    """Each byte comes soon after the one before: only a limit to all of them ends this."""
    with connect(life) as raw:
        sent = trickle(raw, b"GET /health HTTP/1.1\r\nX: " + b"x" * 2000)
        answer = answers(raw)
    assert len(sent) < 2000
    assert answer == b"" or is_408(answer)  # a byte on its way resets what it said


def test_a_body_byte_by_byte_has_no_longer(life: Life) -> None:
    with connect(life) as raw:
        raw.sendall(post(b"{", 10_000))
        sent = trickle(raw, b" " * 2000)
        answer = answers(raw)
    assert len(sent) < 2000
    assert answer == b"" or is_408(answer)
    assert life.worker.n_unfinished == 0


def test_a_second_request_has_no_longer_than_the_first(life: Life) -> None:
    with connect(life) as raw:
        raw.sendall(GET)
        assert health(raw)
        raw.sendall(GET[:10])
        answer = answers(raw)
    assert is_408(answer)


def test_the_rest_of_a_request_that_was_answered_already_is_not_waited_for(life: Life) -> None:
    """Unknown paths are refused without their body; then one byte of it, and no more."""
    with connect(life) as raw:
        raw.sendall(post(b"{", 1000).replace(b"/v1/chat/completions", b"/nowhere"))
        assert raw.recv(4096).startswith(b"HTTP/1.1 404 ")
        raw.sendall(b" ")
        answer = answers(raw)
    assert b"HTTP/1.1" not in answer  # it has had its answer


def test_a_large_body_may_take_as_long_as_its_rate_allows(life: Life) -> None:
    body = json.dumps(ASK).encode()
    body += b" " * (3000 - len(body))
    with connect(life) as raw:
        raw.sendall(post(b"", len(body)))
        for i in range(0, 3000, 250):  # 2,500 bytes/s for 1.2 s
            raw.sendall(body[i : i + 250])
            time.sleep(0.1)
        assert raw.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_requests_in_time_share_a_connection_as_before(life: Life) -> None:
    with connect(life) as raw:
        for _ in range(4):  # longer than the limit, all together
            raw.sendall(GET[:20])
            time.sleep(LIMIT_S / 2)
            raw.sendall(GET[20:])
            assert health(raw)
        raw.sendall(GET + GET[:20])  # the next may come along with the one before
        assert health(raw)
        time.sleep(LIMIT_S / 2)
        raw.sendall(GET[20:])
        assert health(raw)


def test_an_idle_connection_between_requests_is_uvicorns_to_close(life: Life) -> None:
    with connect(life) as raw:
        raw.sendall(GET)
        assert health(raw)
        time.sleep(LIMIT_S * 2)
        raw.sendall(GET)
        assert health(raw)


def test_an_answer_may_take_longer_than_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeaderTimeoutProtocol, "LIMIT_S", 0.2)
    engine = ScriptedEngine(lambda *_: Answer("abcdefgh", chunk=1))
    engine.steps = threading.Semaphore(0)
    with living(engine) as (life, _):

        def slowly() -> None:
            for _ in range(30):
                engine.steps.release()  # type: ignore[union-attr]
                time.sleep(0.05)

        threading.Thread(target=slowly, daemon=True).start()
        start = time.monotonic()
        with life.client.stream("POST", "/v1/chat/completions", json=ASK | {"stream": True}) as got:
            text = got.read().decode()
        assert time.monotonic() - start > 0.4
        assert text.endswith("data: [DONE]\n\n")
