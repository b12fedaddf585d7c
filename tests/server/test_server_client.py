"""`gguf-mtp chat --server`: the same conversation with a server, ours and others."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from typer.testing import CliRunner

from gguf_mtp.cli.app import app
from gguf_mtp.cli.conversation import Conversation
from gguf_mtp.cli.server_client import RemoteSession, api_base
from gguf_mtp.errors import RequestError
from gguf_mtp.server.access import Access
from gguf_mtp.server.app import ServerOptions
from tests.support.chat_formats import CHATML, R1
from tests.support.scripted import Answer, ScriptedEngine
from tests.support.serving import served_of, serving

pytestmark = pytest.mark.server


class Paper:
    """A screen on which everything stays, in order. `at(text)` runs when `text` is written."""

    def __init__(self, *lines: str) -> None:
        self._lines = iter(lines)
        self.said = self.thoughts = ""
        self.on_write = lambda: None

    def ask(self, _gauge: str) -> str | None:
        return next(self._lines, None)

    def write(self, text: str) -> None:
        self.said += text
        self.on_write()

    def think(self, text: str) -> None:
        self.thoughts += text

    def note(self, text: str) -> None:
        self.said += f"[{text}]\n"

    say = note


def scripted(*texts: str, **options) -> ScriptedEngine:
    return ScriptedEngine(lambda _, n: Answer(texts[n % len(texts)]), **options)


def test_a_conversation_with_our_server_shows_its_timings() -> None:
    prompts: list[str] = []

    def script(prompt: str, n: int) -> Answer:
        prompts.append(prompt)
        return Answer(["Hello, Wörld.", "Again."][n])

    engine = ScriptedEngine(script)
    screen = Paper("Hi", "And?", "/stats")
    with serving(engine, served_of(engine, CHATML)) as server:
        session = RemoteSession(server.url, None, None, {"temperature": 0.0, "seed": 3})
        Conversation(session, screen, None, 50).run()
    assert session.model == "scripted"
    first, second, stats = screen.said.split("]\n", 2)
    assert first == (
        "Hello, Wörld.\n[14 tokens, 11.2 tokens/s; "
        "accepted 9 / drafted 9 = 100 %, 2.80 tokens per round"
    )
    assert second.startswith("Again.\n[6 tokens, ")
    assert "20 tokens in 1.75 s" in stats
    assert "accepted 13 / drafted 13" in stats
    assert engine.requests[0].params.seed == 3
    assert engine.requests[0].params.temperature == 0
    assert engine.requests[0].max_tokens == 50
    assert "assistant\nHello, Wörld.<|im_end|>" in prompts[1]


def test_reasoning_is_shown_and_not_sent_back() -> None:
    prompts: list[str] = []

    def script(prompt: str, _: int) -> Answer:
        prompts.append(prompt)
        return Answer("Hm.\n</think>\n\nParis.")

    engine = ScriptedEngine(script)
    screen = Paper("Capital?", "Sure?")
    with serving(engine, served_of(engine, R1)) as server:
        Conversation(RemoteSession(server.url, None, None, {}), screen, None, 1 << 30).run()
    assert screen.thoughts == "Hm.\n\n" * 2
    assert screen.said.startswith("Paris.\n[")
    assert "<｜Assistant｜>Paris.<" in prompts[1].replace("\n", "")


def test_ctrl_c_ends_the_answer_and_the_request() -> None:
    engine = scripted("one two three four five six seven eight nine ten" * 20)
    engine.steps = threading.Semaphore(0)
    screen = Paper("Hi", "/exit")
    engine.steps.release(3)

    def interrupt() -> None:
        if "one" in screen.said and "stopped" not in screen.said:
            screen.on_write = lambda: None
            os.kill(os.getpid(), signal.SIGINT)

    screen.on_write = interrupt
    with serving(engine, served_of(engine, CHATML)) as server:
        Conversation(RemoteSession(server.url, None, None, {}), screen, None, 1 << 30).run()
        while server.worker.n_unfinished:
            engine.steps.release()
            time.sleep(0.02)  # the text is not written out before the server sees that it may stop
    assert "\n[stopped]\n" in screen.said
    assert engine.cancelled == [1]


def test_what_a_server_refuses_is_one_sentence_and_forgotten(capsys) -> None:
    engine = scripted("fine", n_ctx=100)
    screen = Paper("x" * 200, "short")
    with serving(engine, served_of(engine, CHATML)) as server:
        Conversation(RemoteSession(server.url, None, None, {}), screen, None, 1 << 30).run()
    error = capsys.readouterr().err
    assert error.startswith("error: This model's maximum context length is 100")
    assert error.count("\n") == 1
    assert screen.said.startswith("fine\n")


@pytest.mark.parametrize("key", ["key", "clé", "cl\udce9"])
def test_the_key_is_sent_and_its_absence_is_a_sentence(key: str) -> None:
    """Byte for byte as it stands on the command line, also where that is no UTF-8."""
    engine = scripted("fine")
    options = ServerOptions(Access(api_key=key))
    with serving(engine, served_of(engine, CHATML), options) as server:
        assert RemoteSession(server.url, None, key, {}).model == "scripted"
        with pytest.raises(RequestError, match="a valid API key is needed"):
            RemoteSession(server.url, None, None, {})


def test_a_server_that_is_not_there_is_one_sentence() -> None:
    for url in ("127.0.0.1:1", "http://127.0.0.1:1/v1", "http://no.such.host.invalid"):
        with pytest.raises(RequestError, match=r"^cannot reach http://.*: .") as refusal:
            RemoteSession(url, None, None, {})
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("localhost:8080", "http://localhost:8080/v1"),
        ("http://localhost:8080/", "http://localhost:8080/v1"),
        ("https://api.example/v1/", "https://api.example/v1"),
        ("https://gateway.example/openai", "https://gateway.example/openai"),
        ("http://[::1]:8080", "http://[::1]:8080/v1"),
    ],
)
def test_addresses(url: str, base: str) -> None:
    assert api_base(url) == base


# -- other servers -------------------------------------------------------------------------------


@contextmanager
def other_server(body: bytes, status: int = 200) -> Iterator[str]:
    """Answers every request with `body` and ends the connection."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Silent."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_server_without_timings() -> None:
    stream = (
        b': comment\r\n\r\ndata: {"choices":[{"index":0,"delta":{"role":"assistant"}}]}\n\n'
        b'data:{"choices":[{"delta":{"content":"H\xc3\xa9"},"finish_reason":null}]}\n\n'
        b'data: {"choices":[{"delta":{"content":null},"finish_reason":"stop"}]}\n\n'
        b'data: {"choices":[],"usage":{"completion_tokens":1}}\n\ndata: [DONE]\n\n'
    )
    screen = Paper("Hi", "/stats")
    with other_server(stream) as url:
        Conversation(RemoteSession(url, "llama3", None, {}), screen, None, 1 << 30).run()
    assert screen.said == "Hé\n[nothing has been answered yet]\n"


def test_reasoning_in_the_text_of_another_server_is_reasoning() -> None:
    stream = (
        b'data: {"choices":[{"delta":{"content":"<thi"}}]}\n\n'
        b'data: {"choices":[{"delta":{"content":"nk>Hm.</th"}}]}\n\n'
        b'data: {"choices":[{"delta":{"content":"ink>\\n\\nParis."}}]}\n\n'
        b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    )
    screen = Paper("Hi")
    with other_server(stream) as url:
        talk = Conversation(RemoteSession(url, "llama3", None, {}), screen, None, 1 << 30)
        talk.run()
    assert (screen.thoughts, screen.said) == ("Hm.\n\n", "Paris.\n")
    assert talk._history[1]["content"] == "Paris."


def test_a_server_that_is_full_is_asked_again_with_less(capsys) -> None:
    engine = scripted("x" * 30, n_ctx=120)
    screen = Paper("a" * 20, "b" * 20, "c" * 20)
    with serving(engine, served_of(engine, CHATML)) as server:
        Conversation(RemoteSession(server.url, None, None, {}), screen, None, 1 << 30).run()
    assert capsys.readouterr().err == ""
    assert "earlier exchanges were left out" in screen.said


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"<html>Bad gateway</html>", 502, "the server answered 502"),
        (b'{"error": "model not\\nfound"}', 404, "model not found"),
        (b'data: {"error": {"message": "out of memory"}}\n\n', 200, "out of memory"),
    ],
)
def test_errors_of_other_servers(body: bytes, status: int, words: str, capsys) -> None:
    screen = Paper("Hi")
    with other_server(body, status) as url:
        Conversation(RemoteSession(url, "llama3", None, {}), screen, None, 1 << 30).run()
    assert capsys.readouterr().err == f"error: {words}\n"
    assert screen.said == ""


@pytest.mark.parametrize("option", [("--ctx", "512"), ("--draft", "off"), ("--strict",)])
def test_options_that_a_server_would_disregard_are_refused(option: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, ["chat", "--server", "127.0.0.1:1", *option])
    assert result.exit_code == 2
    assert "set context, threads, drafting" in result.output


def test_the_command_talks_to_a_server() -> None:
    engine = scripted("Hello, Wörld.")
    with serving(engine, served_of(engine, CHATML)) as server:
        arguments = ["chat", "--server", server.url, "--temp", "0"]
        result = CliRunner().invoke(app, arguments, input="Hi\n")
    assert (result.exit_code, result.output) == (0, "Hello, Wörld.\n")
    assert engine.requests[0].params.temperature == 0
