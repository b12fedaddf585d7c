"""The web page's files over HTTP; what it does in a browser is in test_web.py."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import resources

import pytest

from gguf_mtp.server.access import Access
from gguf_mtp.server.app import ServerOptions
from tests.support.chat_formats import CHATML
from tests.support.scripted import Answer, ScriptedEngine
from tests.support.serving import Server, error_of, served_of, serving

pytestmark = pytest.mark.server

FILES = ["/", "/web/page.css", "/web/page.js"]
FILES += [f"/web/{name}.js" for name in ("messages", "settings", "store", "stream", "strip")]


@pytest.fixture
def locked() -> Iterator[Server]:
    engine = ScriptedEngine(lambda *_: Answer("fine"))
    options = ServerOptions(Access(api_key="key"))
    with serving(engine, served_of(engine, CHATML), options) as running:
        yield running


def test_the_page_needs_no_key_and_lets_nothing_else_in(locked: Server) -> None:
    for path in FILES:
        response = locked.client.get(path)
        assert response.status_code == 200, path
        policy = response.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
    kinds = [locked.client.get(path).headers["content-type"] for path in FILES[:3]]
    assert kinds == [f"text/{kind}; charset=utf-8" for kind in ("html", "css", "javascript")]
    assert locked.client.head("/").status_code == 200


@pytest.mark.parametrize("path", ["/web/", "/web/../page.py", "/web/%2e%2e/app.py", "/web/x.js"])
def test_only_the_pages_files_are_served(locked: Server, path: str) -> None:
    assert locked.client.get(path).status_code in (401, 404)
    error_of(locked.client.post("/", content=b"x"), 405)


def test_the_page_asks_nobody_else() -> None:
    """No address but the server's own, and nothing inline that the policy would refuse."""
    for file in resources.files("gguf_mtp.server").joinpath("web").iterdir():
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"(https?:)?//[a-z]", re.sub(r"(?m)^\s*//.*$| // .*$", "", text)), file
        assert "innerHTML" not in text
        assert (
            not re.search(r"<script>|<style|\son\w+=|\sstyle=", text) or file.name != "index.html"
        )


def test_every_file_that_is_asked_for_is_there(locked: Server) -> None:
    wanted = set(re.findall(r'(?:src|href)="(web/[^"]+)"', locked.client.get("/").text))
    for script in [path for path in FILES if path.endswith(".js")]:
        text = locked.client.get(script).text
        wanted |= {f"web/{name}" for name in re.findall(r'from "\./([^"]+)"', text)}
    assert wanted == {path[1:] for path in FILES[1:]}


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("127.0.0.1:80", "http://127.0.0.1:80", 200),
        ("localhost:80", "http://localhost:80", 200),
        ("[::1]:80", "http://[::1]:80", 200),
        ("127.0.0.1:80", "https://127.0.0.1:80", 200),
        ("127.0.0.1:80", "http://127.0.0.1:81", 403),
        ("127.0.0.1:80", "http://localhost:80", 403),
        ("127.0.0.1:80", "null", 403),
        # A name that somebody has made to point here: the browser takes both for the same.
        ("evil.example:80", "http://evil.example:80", 403),
        ("127.0.0.1.evil.example:80", "http://127.0.0.1.evil.example:80", 403),
        ("localhost.evil.example", "http://localhost.evil.example", 403),
        ("", "http://", 403),
    ],
)
def test_the_page_may_ask_its_own_server(host: str, origin: str, status: int) -> None:
    engine = ScriptedEngine(lambda *_: Answer("fine"))
    with serving(engine, served_of(engine, CHATML)) as server:
        headers = {"Host": host, "Origin": origin}
        response = server.client.get("/v1/models", headers=headers)
    assert response.status_code == status
