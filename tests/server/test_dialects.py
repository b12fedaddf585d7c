"""Anthropic's Messages and OpenAI's Responses: what is asked reaches the model as a chat would, and
a stream says what a whole answer says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from gguf_mtp.errors import RequestError
from gguf_mtp.server.access import Access
from gguf_mtp.server.app import ServerOptions
from gguf_mtp.server.dialects.stored import ResponseStore
from tests.support.chat_formats import CHATML, V31
from tests.support.scripted import Answer, ScriptedEngine
from tests.support.serving import Server, error_of, served_of, serving

pytestmark = pytest.mark.server

CALL = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Paris"}'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
WEATHER = {"name": "weather", "description": "x", "input_schema": {"type": "object"}}
FUNCTION = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
HELLO = [{"role": "user", "content": "Hello"}]


@contextmanager
def over(
    *answers: str, template: str = V31, **options: Any
) -> Iterator[tuple[Server, list[str], ScriptedEngine]]:
    """A server that gives these answers in turn, the prompts it was given, and its engine."""
    prompts: list[str] = []

    def script(prompt: str, n: int) -> Answer:
        prompts.append(prompt)
        return Answer(answers[n % len(answers)], chunk=3)

    engine = ScriptedEngine(script, n_ctx=3000)
    with serving(engine, served_of(engine, template), **options) as server:
        yield server, prompts, engine


def post(server: Server, path: str, **body: Any) -> dict[str, Any]:
    response = server.client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def events(server: Server, path: str, **body: Any) -> list[dict[str, Any]]:
    """A stream's events; each is named as its data says."""
    response = server.client.post(path, json=body | {"stream": True})
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    found = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def message(server: Server, **body: Any) -> dict[str, Any]:
    return post(server, "/v1/messages", **{"max_tokens": 500, "messages": HELLO} | body)


# -- Anthropic ---------------------------------------------------------------------------------


def put_together(stream: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream of Anthropic's makes."""
    assert (stream[0]["type"], stream[-1]["type"]) == ("message_start", "message_stop")
    whole = stream[0]["message"]
    for event in stream[1:-1]:
        kind = event["type"]
        if kind == "content_block_start":
            assert event["index"] == len(whole["content"])
            whole["content"].append(event["content_block"])
        elif kind == "content_block_delta":
            block, delta = whole["content"][event["index"]], event["delta"]
            for name in ("text", "thinking"):
                if name in delta:
                    block[name] += delta[name]
            if "partial_json" in delta:
                block["json"] = block.get("json", "") + delta["partial_json"]
        elif kind == "content_block_stop" and "json" in whole["content"][event["index"]]:
            block = whole["content"][event["index"]]
            block["input"] = json.loads(block.pop("json"))
        elif kind == "message_delta":
            whole |= event["delta"] | {"usage": event["usage"]}
    return whole


def without_ids(whole: dict[str, Any]) -> dict[str, Any]:
    blocks = [{k: v for k, v in block.items() if k != "id"} for block in whole["content"]]
    usage = {"output_tokens": whole["usage"]["output_tokens"]}  # the second one's prompt is cached
    return {**whole, "id": "", "content": blocks, "usage": usage}


def test_a_message_whole_and_streamed() -> None:
    text = "Let me see.</think>I look." + CALL
    body = {"max_tokens": 500, "messages": HELLO, "tools": [WEATHER], "thinking": {
        "type": "enabled", "budget_tokens": 1024}}  # fmt: skip
    with over(text) as (server, _, _):
        whole = post(server, "/v1/messages", **body)
        streamed = put_together(events(server, "/v1/messages", **body))
    thought, said, call = whole["content"]
    assert thought == {"type": "thinking", "thinking": "Let me see.", "signature": ""}
    assert said == {"type": "text", "text": "I look."}
    assert (call["name"], call["input"]) == ("weather", {"city": "Paris"})
    assert (whole["role"], whole["stop_reason"]) == ("assistant", "tool_use")
    assert without_ids(streamed) == without_ids(whole)


def test_a_conversation_of_anthropics_is_the_chat_it_means() -> None:
    conversation = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?", "cache_control": {}}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "x"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Paris"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": [
                {"type": "text", "text": "sunny"}]},
            {"type": "text", "text": "Thanks. And tomorrow?"},
        ]},
    ]  # fmt: skip
    call = {"id": "c1", "type": "function", "function": {
        "name": "weather", "arguments": '{"city": "Paris"}'}}  # fmt: skip
    chat = [
        {"role": "system", "content": "Be\nbrief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call],
         "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "user", "content": "Thanks. And tomorrow?"},
    ]  # fmt: skip
    tool = {"name": "weather", "description": "x", "parameters": {"type": "object"}}
    system = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]
    with over("ok") as (server, prompts, engine):
        message(server, messages=conversation, system=system, tools=[WEATHER], top_k=5)
        server.answer(messages=chat, tools=[{"type": "function", "function": tool}], top_k=5)
        n = post(
            server, "/v1/messages/count_tokens",
            messages=conversation, system=system, tools=[WEATHER],
        )["input_tokens"]  # fmt: skip
        first, second = engine.requests
    assert prompts[0] == prompts[1]
    assert "sunny" in prompts[0]
    assert first.params.top_k == second.params.top_k == 5
    assert n == len(first.prompt)


@pytest.mark.parametrize(
    ("body", "reason", "sequence", "text"),
    [
        ({}, "end_turn", None, "one two three"),
        ({"max_tokens": 5}, "max_tokens", None, "one t"),
        ({"stop_sequences": ["four", " two"]}, "stop_sequence", " two", "one"),
    ],
)
def test_why_a_message_ended(
    body: dict[str, Any], reason: str, sequence: str | None, text: str
) -> None:
    with over("one two three", template=CHATML) as (server, _, _):
        found = message(server, **body)
        stream = put_together(
            events(server, "/v1/messages", **{"max_tokens": 500, "messages": HELLO} | body)
        )
    for one in (found, stream):
        assert (one["stop_reason"], one["stop_sequence"]) == (reason, sequence)
        assert one["content"] == [{"type": "text", "text": text}]


@pytest.mark.parametrize(
    ("choice", "is_begun"),
    [
        ({"type": "any"}, True),
        ({"type": "tool", "name": "weather"}, True),
        ({"type": "auto"}, False),
    ],
)
def test_a_call_that_must_be_made_is_begun_in_the_prompt(
    choice: dict[str, Any], is_begun: bool
) -> None:
    with over('{"city": "Rome"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>') as (server, prompts, _):
        message(server, tools=[WEATHER], tool_choice=choice)
    assert ("<｜tool▁call▁begin｜>" in prompts[0].rpartition("Hello")[2]) == is_begun


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]},
         "messages[0].content[0] is of type 'image', but this model reads only text"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
         "only Anthropic's own servers"),
        ({"tool_choice": {"type": "tool"}}, "must have a name"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not supported"),
        ({"messages": [{"role": "user", "content": "x" * 9000}]}, "maximum context length"),
        ({"temperature": -1}, "temperature"),
    ],
)  # fmt: skip
def test_refusals_are_anthropics(body: dict[str, Any], says: str) -> None:
    with over("x") as (server, _, engine):
        response = server.client.post(
            "/v1/messages", json={"max_tokens": 5, "messages": HELLO} | body
        )
        assert not engine.requests
    assert response.status_code == 400
    found = response.json()
    assert found["type"] == "error"
    assert found["error"]["type"] == "invalid_request_error"
    assert says in found["error"]["message"]


def test_anthropics_key_opens_the_server() -> None:
    with over("x", options=ServerOptions(Access("sesame"))) as (server, _, _):
        body = {"max_tokens": 5, "messages": HELLO}
        for headers, status in (
            ({"x-api-key": "sesame"}, 200),
            ({"Authorization": "Bearer sesame"}, 200),
            ({"x-api-key": "simsim"}, 401),
            ({"Authorization": "Basic sesame"}, 401),
            ({}, 401),
        ):
            found = server.client.post("/v1/messages", json=body, headers=headers)
            assert found.status_code == status, headers


# -- OpenAI's Responses ------------------------------------------------------------------------


def test_a_response_whole_and_streamed() -> None:
    body = {"input": "Hello", "tools": [FUNCTION]}
    with over("I look." + CALL) as (server, _, _):
        whole = post(server, "/v1/responses", **body)
        stream = events(server, "/v1/responses", **body)
    said, call = whole["output"]
    assert (said["type"], said["role"], said["content"][0]["text"]) == (
        "message", "assistant", "I look."
    )  # fmt: skip
    assert (call["type"], call["name"], call["arguments"]) == (
        "function_call", "weather", '{"city": "Paris"}'
    )  # fmt: skip
    assert [event["sequence_number"] for event in stream] == list(range(len(stream)))
    kinds = [event["type"].removeprefix("response.") for event in stream]
    assert list(dict.fromkeys(kinds)) == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "function_call_arguments.delta", "function_call_arguments.done", "completed",
    ]  # fmt: skip
    deltas = [e["delta"] for e in stream if e["type"] == "response.output_text.delta"]
    assert "".join(deltas) == "I look."
    done = [e["item"] for e in stream if e["type"] == "response.output_item.done"]
    last = stream[-1]["response"]
    assert last["output"] == done
    assert [item["type"] for item in done] == ["message", "function_call"]
    assert done[1]["arguments"] == call["arguments"]
    for name in ("status", "usage", "error", "incomplete_details"):
        if name != "usage":
            assert last[name] == whole[name]
    assert last["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_reasoning_is_an_item_of_its_own() -> None:
    body = {"input": "Hello", "reasoning": {"effort": "high"}}
    with over("hm, so</think>Paris.") as (server, prompts, _):
        whole = post(server, "/v1/responses", **body)
        stream = events(server, "/v1/responses", **body)
        post(server, "/v1/responses", input="Hello", reasoning={"effort": "none"})
    assert [prompt.endswith("<think>") for prompt in prompts] == [True, True, False]
    for output in (whole["output"], stream[-1]["response"]["output"]):
        thought, said = output
        assert (thought["type"], thought["summary"]) == ("reasoning", [])
        assert thought["content"] == [{"type": "reasoning_text", "text": "hm, so"}]
        assert said["content"][0]["text"] == "Paris."
    deltas = [e["delta"] for e in stream if e["type"] == "response.reasoning_text.delta"]
    assert "".join(deltas) == "hm, so"


def test_items_are_the_chat_they_mean() -> None:
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [
            {"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [
            {"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    ]  # fmt: skip
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm",
         "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]  # fmt: skip
    with over("ok") as (server, prompts, _):
        post(server, "/v1/responses", input=items, instructions="Be brief.")
        server.answer(messages=chat)
    assert prompts[0] == prompts[1]
    assert "sunny" in prompts[0]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_response_goes_on_with_the_one_before(is_streamed: bool) -> None:
    with over("Paris.", "Rome.", template=CHATML) as (server, prompts, _):
        body = {"input": "France?", "instructions": "Be brief."}
        if is_streamed:
            first = events(server, "/v1/responses", **body)[-1]["response"]
        else:
            first = post(server, "/v1/responses", **body)
        second = post(server, "/v1/responses", input="Italy?", previous_response_id=first["id"])
        assert second["previous_response_id"] == first["id"]
        parts = [prompts[1].index(text) for text in ("France?", "Paris.", "Italy?")]
        assert parts == sorted(parts)
        assert "Be brief." in prompts[0]
        assert "Be brief." not in prompts[1], "instructions are each request's own"
        assert server.client.get(f"/v1/responses/{first['id']}").json() == first
        assert server.client.delete(f"/v1/responses/{first['id']}").json()["deleted"]
        for gone in (first["id"], "resp_x"):
            found = server.client.post(
                "/v1/responses", json={"input": "x", "previous_response_id": gone}
            )
            assert found.status_code == 400
            assert f"there is no response '{gone}'" in found.json()["error"]["message"]
        unkept = post(server, "/v1/responses", input="x", store=False)
        for ask in (server.client.get, server.client.delete):
            error = error_of(ask(f"/v1/responses/{unkept['id']}"), 404)
            assert error["message"].startswith(f"there is no response {unkept['id']!r}")


def test_a_response_that_was_cut_says_so() -> None:
    with over("one two three", template=CHATML) as (server, _, _):
        body = {"input": "Hello", "max_output_tokens": 5}
        whole = post(server, "/v1/responses", **body)
        last = events(server, "/v1/responses", **body)[-1]
    assert last["type"] == "response.incomplete"
    for response in (whole, last["response"]):
        assert response["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert response["output"][0]["status"] == "incomplete"


def test_a_response_obeys_a_schema() -> None:
    schema = {"type": "object", "properties": {"n": {"const": 7}}, "required": ["n"]}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    with over("x", template=CHATML) as (server, _, engine):
        server.client.post("/v1/responses", json={"input": "Hi", "text": {"format": form}})
        server.client.post("/v1/responses", json={"input": "Hi"})
    bound, free = engine.requests
    assert bound.options.constraint is not None
    assert free.options.constraint is None


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0] is of type 'web_search'"),
        ({"input": [{"type": "image_generation_call"}]}, "input[0] is of type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input[0].content[0] is of type 'input_image'"),
        ({"background": True}, "background is not supported"),
        ({"input": []}, "messages"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "messages[0].role"),
    ],
)  # fmt: skip
def test_what_responses_cannot_do_is_said(body: dict[str, Any], says: str) -> None:
    with over("x") as (server, _, engine):
        response = server.client.post("/v1/responses", json={"input": "Hi"} | body)
        assert not engine.requests
    assert response.status_code == 400
    assert says in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_a_failure_in_the_middle_ends_the_stream_with_its_reason(path: str) -> None:
    failures = {3: RuntimeError("boom")}
    engine = ScriptedEngine(lambda *_: Answer("one two three", chunk=3), failures=failures)  # type: ignore[arg-type]
    body = {"max_tokens": 50, "messages": HELLO, "input": "Hello"}
    with serving(engine, served_of(engine, CHATML)) as server:
        last = events(server, path, **body)[-1]
    error = last["error"] if path.endswith("messages") else last["response"]["error"]
    assert error["message"] == "the request failed inside the server; see the server log"


def test_the_store_has_a_bound() -> None:
    store = ResponseStore(most=2, most_chars=100)
    for id_ in "abc":
        store.add({"id": id_}, [])
        store.find("a" if id_ == "b" else id_)
    assert store.find("a").response == {"id": "a"}, "used since"
    for gone in ("b", "d"):
        with pytest.raises(RequestError, match=f"no response '{gone}'"):
            store.find(gone)
    store.add({"id": "d"}, [{"content": "x" * 60}])
    with pytest.raises(RequestError):
        store.find("c")
    store.add({"id": "e"}, [{"content": "x" * 200}])
    with pytest.raises(RequestError):
        store.find("e")
    assert store.find("d")


def test_tokens_of_a_chat_are_counted() -> None:
    with over("x") as (server, _, engine):
        n = post(server, "/v1/chat/completions/input_tokens", messages=HELLO)["input_tokens"]
        server.answer(messages=HELLO)
        assert n == len(engine.requests[0].prompt)
