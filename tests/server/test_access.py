"""Who may ask: the key, web pages, and bodies that are too large."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from gguf_mtp.server.access import Access
from gguf_mtp.server.app import ServerOptions
from tests.support.chat_formats import CHATML
from tests.support.scripted import Answer, ScriptedEngine
from tests.support.serving import Server, error_of, served_of, serving
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.server


@pytest.fixture
def locked() -> Iterator[Server]:
    engine = ScriptedEngine(lambda *_: Answer("fine"))
    options = ServerOptions(Access(api_key="sésame", max_body=1000))
    with serving(engine, served_of(engine, CHATML), options) as running:
        yield running


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer wrong", "Bearer s", "Basic sésame", "sésame", "Bearer sésames"],
)
def test_a_key_closes_everything_but_health_and_the_page(
    locked: Server, header: str | None
) -> None:
    headers = {} if header is None else {"Authorization": header.encode()}
    get, post = locked.client.get, locked.client.post
    for path in ("/v1/models", "/v1/models/x", "/nothing", "/health/", "/healthz", "/docs", "/web"):
        error = error_of(get(path, headers=headers), 401)
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/v1/x"):
        response = post(path, content=b"not even json", headers=headers)
        assert response.headers["www-authenticate"] == "Bearer"
        error_of(response, 401)
    assert get("/health", headers=headers).status_code == 200


def test_the_key_opens(locked: Server) -> None:
    locked.client.headers.update({b"Authorization": "bearer sésame".encode()})
    assert locked.chat().status_code == 200


def test_the_key_is_in_no_representation() -> None:
    assert "secret" not in repr(ServerOptions(Access(api_key="secret")))


def test_large_bodies_are_refused_before_they_are_read(locked: Server) -> None:
    locked.client.headers.update({b"Authorization": "Bearer sésame".encode()})
    error = error_of(locked.chat(messages=[{"role": "user", "content": "x" * 1000}]), 413)
    assert error["message"] == "the request is larger than 1000 bytes"

    def pieces() -> Iterator[bytes]:  # without a Content-Length
        yield from [b" " * 100] * 20

    response = locked.client.post(
        "/v1/chat/completions", content=pieces(), headers={"Content-Type": "application/json"}
    )
    assert error_of(response, 413) == error


def test_web_pages_are_kept_out_unless_allowed() -> None:
    engine = ScriptedEngine(lambda *_: Answer("fine"))
    page = {"Origin": "https://page.example"}
    with serving(engine, served_of(engine, CHATML)) as server:
        error_of(server.client.get("/v1/models", headers=page), 403)
        plain = server.client.get("/v1/models")
        assert "access-control-allow-origin" not in plain.headers
    options = ServerOptions(Access(origins=("https://page.example",)))
    with serving(engine, served_of(engine, CHATML), options) as server:
        allowed = server.client.get("/v1/models", headers=page)
        assert allowed.headers["access-control-allow-origin"] == "https://page.example"
        ask = page | {"Access-Control-Request-Method": "POST"}
        assert server.client.options("/v1/models", headers=ask).status_code == 200
        error_of(server.client.get("/v1/models", headers={"Origin": "https://x.example"}), 403)


def test_headers_that_are_no_http_do_no_harm(locked: Server) -> None:
    address = locked.client.base_url
    with socket.create_connection((address.host, address.port), timeout=PATIENCE_S) as raw:
        raw.sendall(b"POST /v1/models HTTP/1.1\r\nContent-Length: -5\r\n\r\n")
        assert b" 400 " in raw.recv(1000)
    assert locked.client.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8080", 200), ("[::1]:8080", 200), ("192.168.1.7", 200), ("localhost", 200),
        ("LOCALHOST:1", 200), ("llm:8080", 200), ("box.local", 200), ("host.docker.internal", 200),
        ("rebound.example:8080", 403), ("127.0.0.1.nip.io", 403), ("localhost.evil.com", 403),
        ("[::1", 403), ("localhost.:80", 200), ("rebound.example.", 403),
    ],
)  # fmt: skip
def test_names_that_anybody_can_register_are_not_answered(host: str, status: int) -> None:
    """A page whose name was made to point here is of one origin with the server then, and sends
    no Origin header; its name is all that tells it from a client."""
    engine = ScriptedEngine(lambda *_: Answer("fine"))
    named = {"Host": host}
    with serving(engine, served_of(engine, CHATML)) as server:
        for path in ("/v1/models", "/metrics", "/"):
            assert server.client.get(path, headers=named).status_code == status
        assert server.client.get("/health", headers=named).status_code == 200
        if status == 403:
            message = error_of(server.client.get("/v1/models", headers=named), 403)["message"]
            assert host in message
            assert "--allowed-host" in message


@pytest.mark.parametrize(
    "access",
    [
        Access(hosts=("ai.example",)), Access(hosts=("AI.example.:8080",)), Access(hosts=("*",)),
        Access(origins=("*",)), Access(origins=("https://ai.example",)), Access(api_key="key"),
    ],
)  # fmt: skip
def test_a_name_can_be_allowed(access: Access) -> None:
    engine = ScriptedEngine(lambda *_: Answer("fine"))
    headers = {"Host": "ai.example", "Authorization": "Bearer key"}
    with serving(engine, served_of(engine, CHATML), ServerOptions(access)) as server:
        assert server.client.get("/v1/models", headers=headers).status_code == 200
