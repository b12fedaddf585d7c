"""Ollama's endpoints: what is asked reaches the model as a chat would, and the lines of a stream
say what a whole answer says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.test_dialects import CALL, HELLO, over, post
from tests.support.chat_formats import CHATML
from tests.support.scripted import Answer, ScriptedEngine
from tests.support.serving import Server, served_of, serving

pytestmark = pytest.mark.server

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def lines(server: Server, path: str, **body: Any) -> list[dict[str, Any]]:
    """Of a stream, which is what Ollama answers with unless told otherwise."""
    response = server.client.post(path, json=body)
    assert response.headers["content-type"] == "application/x-ndjson", response.text
    assert response.text.endswith("\n")
    return [json.loads(line) for line in response.text.splitlines()]


def test_a_chat_whole_and_in_lines() -> None:
    with over("hm</think>I look." + CALL) as (server, prompts, _):
        body = {"messages": HELLO, "tools": TOOLS, "think": True}
        whole = post(server, "/api/chat", **body, stream=False)
        stream = lines(server, "/api/chat", **body)
    assert prompts[0] == prompts[1]
    assert prompts[0].endswith("<think>")
    calls = [{"function": {"name": "weather", "arguments": {"city": "Paris"}}}]
    assert whole["message"] == {
        "role": "assistant", "content": "I look.", "thinking": "hm", "tool_calls": calls
    }  # fmt: skip
    assert (whole["done"], whole["done_reason"]) == (True, "stop")
    assert [line["done"] for line in stream] == [False] * (len(stream) - 1) + [True]
    for name, text in (("content", "I look."), ("thinking", "hm")):
        assert "".join(line["message"].get(name, "") for line in stream) == text
    assert [
        line["message"]["tool_calls"] for line in stream if "tool_calls" in line["message"]
    ] == [calls]
    for name in ("prompt_eval_count", "eval_count", "done_reason", "model"):
        assert stream[-1][name] == whole[name]
    assert whole["eval_duration"] > 0


def test_a_conversation_of_ollamas_is_the_chat_it_means() -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Paris"}}}
    conversation = [
        *HELLO,
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_name": "weather", "content": "sunny"},
    ]
    chat = [
        *HELLO,
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [
            {"type": "function", "function": {
                "name": "weather", "arguments": '{"city": "Paris"}'}}]},
        {"role": "tool", "content": "sunny"},
    ]  # fmt: skip
    options = {"top_k": 5, "seed": 3, "num_predict": 7, "stop": ["x"], "num_ctx": 99, "num_gpu": 1}
    with over("ok") as (server, prompts, engine):
        post(server, "/api/chat", messages=conversation, options=options, stream=False)
        server.answer(messages=chat)
        first = engine.requests[0]
    assert prompts[0] == prompts[1]
    assert "sunny" in prompts[0]
    assert (first.params.top_k, first.params.seed) == (5, 3)


def test_generate_asks_a_question_or_goes_on_with_a_text() -> None:
    with over("one two", template=CHATML) as (server, prompts, _):
        whole = post(server, "/api/generate", prompt="Hi", system="Be brief.", stream=False)
        stream = lines(server, "/api/generate", prompt="Hi", system="Be brief.")
        raw = post(server, "/api/generate", prompt="Once", raw=True, stream=False)
        cut = post(server, "/api/generate", prompt="Hi", stream=False, options={"num_predict": 4})
        server.answer(messages=[{"role": "system", "content": "Be brief."},
                                {"role": "user", "content": "Hi"}])  # fmt: skip
    assert whole["response"] == raw["response"] == "one two"
    assert "".join(line["response"] for line in stream) == "one two"
    assert prompts[0] == prompts[1] == prompts[4]
    assert prompts[2].removeprefix("<｜begin▁of▁sentence｜>") == "Once"
    assert (cut["response"], cut["done_reason"]) == ("one ", "length")


def test_a_format_binds_the_answer() -> None:
    schema = {"type": "object", "properties": {"n": {"const": 7}}}
    with over("x", template=CHATML) as (server, _, engine):
        for form in ("json", schema, "", None):
            server.client.post("/api/chat", json={"messages": HELLO, "format": form})
    bound = [request.options.constraint is not None for request in engine.requests]
    assert bound == [True, True, False, False]


def test_what_is_not_asked_is_answered_without_the_model() -> None:
    with over("x") as (server, _, engine):
        for path, body in (("/api/chat", {"messages": []}), ("/api/generate", {})):
            assert post(server, path, model="m", **body)["done_reason"] == "load"
        names = [server.client.get(f"/api/{path}").json()["models"] for path in ("tags", "ps")]
        assert [[model["name"] for model in some] for some in names] == [["scripted"]] * 2
        shown = post(server, "/api/show", model="scripted")
        assert shown["capabilities"] == ["completion", "tools", "thinking"]
        assert shown["model_info"]["unknown.context_length"] == 3000
        assert server.client.get("/api/version").json().keys() == {"version"}
        assert not engine.requests


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("chat", {"messages": [{"role": "user", "content": "x", "images": ["a"]}]}, "has images"),
        ("chat", {"messages": [{"role": "nobody"}]}, "messages[0].role"),
        ("generate", {"prompt": "x", "suffix": "y"}, "suffix is not supported"),
        ("generate", {"prompt": "x", "context": [1, 2]}, "context is not supported"),
        ("generate", {"prompt": "x", "options": {"mirostat": 1}}, "mirostat is not supported"),
        ("generate", {"prompt": "x", "options": {"top_p": "a"}}, "top_p"),
        ("generate", {"prompt": "x", "format": "xml"}, "format"),
        ("generate", {"prompt": "x" * 9000}, "maximum context length"),
    ],
)
def test_refusals_are_ollamas(path: str, body: dict[str, Any], says: str) -> None:
    with over("x") as (server, _, engine):
        response = server.client.post(f"/api/{path}", json=body)
        assert not engine.requests
    assert response.status_code == 400
    assert response.json().keys() == {"error"}
    assert says in response.json()["error"]


def test_a_failure_in_the_middle_is_a_line() -> None:
    failures = {3: RuntimeError("boom")}
    engine = ScriptedEngine(lambda *_: Answer("one two three", chunk=3), failures=failures)  # type: ignore[arg-type]
    with serving(engine, served_of(engine, CHATML)) as server:
        last = lines(server, "/api/chat", messages=HELLO)[-1]
    assert last == {"error": "the request failed inside the server; see the server log"}
