"""Reasoning and tool calls through the server, as DeepSeek's models write them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.chat_formats import CHATML, R1, V3, V31
from tests.support.scripted import Answer, ScriptedEngine
from tests.support.serving import Server, served_of, serving

pytestmark = pytest.mark.server

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
ARGUMENTS = '{"city": "Paris", "unit": "°C"}'
V3_TEXT = (
    f"I look.\n{BEGIN}{CALL}function{SEP}weather\n```json\n{ARGUMENTS}\n```{CALL_END}\n"
    f'{CALL}function{SEP}time\n```json\n{{"zone": "CET"}}\n```{CALL_END}{END}'
)
V31_TEXT = f'I look.{BEGIN}{CALL}weather{SEP}{ARGUMENTS}{CALL_END}{CALL}time{SEP}{{"zone": "CET"}}'
V31_TEXT += f"{CALL_END}{END}"
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("weather", "time")
]
NAMED = {"type": "function", "function": {"name": "weather"}}
HELLO = {"role": "user", "content": "Hello"}


@contextmanager
def over(
    template: str, *answers: str, chunk: int = 3
) -> Iterator[tuple[Server, ScriptedEngine, list[str]]]:
    """A server for a model with this template; the prompts that its engine was given."""
    prompts: list[str] = []

    def script(prompt: str, n: int) -> Answer:
        prompts.append(prompt)
        return Answer(answers[n % len(answers)], chunk=chunk)

    engine = ScriptedEngine(script)
    with serving(engine, served_of(engine, template)) as server:
        yield server, engine, prompts


def put_together(events: list) -> tuple[dict, str]:
    """The message that a stream's deltas make, and the finish reason; checks their order."""
    message: dict = {"content": "", "reasoning_content": "", "tool_calls": []}
    finish = None
    assert events[-1] == "[DONE]"
    for event in events[:-1]:
        [choice] = event["choices"]
        assert finish is None, "a delta after the end"
        finish = choice["finish_reason"]
        delta = choice["delta"]
        if delta.get("reasoning_content"):
            assert not message["content"], "reasoning after content"
        message["reasoning_content"] += delta.get("reasoning_content", "")
        message["content"] += delta.get("content", "")
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(message["tool_calls"])
                assert call["function"].keys() == {"name", "arguments"}
                message["tool_calls"].append(call | {"function": dict(call["function"])})
            else:
                assert call["index"] == len(message["tool_calls"]) - 1
                assert call["function"].keys() == {"arguments"}
                message["tool_calls"][-1]["function"]["arguments"] += call["function"]["arguments"]
    return message, finish


# -- reasoning -----------------------------------------------------------------------------------

REASONED = "Let me see.\n\nParis < Rome?\n</think>\n\nParis."
PARTS = {
    "role": "assistant",
    "reasoning_content": "Let me see.\n\nParis < Rome?",
    "content": "Paris.",
}


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_reasoning_that_the_prompt_opened(chunk: int) -> None:
    with over(R1, REASONED, chunk=chunk) as (server, _, prompts):
        answer = server.answer(max_tokens=200)
        message, finish = put_together(server.events(max_tokens=200))
    assert prompts[0].endswith("<｜Assistant｜><think>\n")
    assert answer["choices"][0]["message"] == PARTS
    assert {k: message[k] for k in ("reasoning_content", "content")} == {
        k: PARTS[k] for k in ("reasoning_content", "content")
    }
    assert finish == "stop"
    n_reasoning = REASONED.index("</think>") + 1  # the closing tag is one token
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": n_reasoning}


def test_reasoning_that_the_answer_opens_itself() -> None:
    template = R1.replace("<think>\n", "")
    with over(template, f"<think>\n{REASONED}", "Just Paris.") as (server, _, _):
        assert server.answer()["choices"][0]["message"] == PARTS
        plain = server.answer()
    assert plain["choices"][0]["message"] == {"role": "assistant", "content": "Just Paris."}
    assert plain["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_the_thinking_switch() -> None:
    with over(V31, REASONED, "Paris.") as (server, _, prompts):
        thinking = server.answer(chat_template_kwargs={"thinking": True})
        plain = server.answer()
    assert prompts[0].endswith("<think>")
    assert prompts[1].endswith("<think></think>")
    assert thinking["choices"][0]["message"] == PARTS
    assert plain["choices"][0]["message"] == {"role": "assistant", "content": "Paris."}


def test_an_answer_cut_inside_its_reasoning_is_all_reasoning() -> None:
    with over(R1, REASONED) as (server, _, _):
        answer = server.answer(max_tokens=7)
        message, finish = put_together(server.events(max_tokens=7))
    [choice] = answer["choices"]
    expected = {"role": "assistant", "content": "", "reasoning_content": "Let me"}
    assert (choice["message"], choice["finish_reason"]) == (expected, "length")
    assert (message["reasoning_content"], message["content"], finish) == ("Let me", "", "length")
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 7}


def test_a_model_that_does_not_reason_may_write_the_tags() -> None:
    with over(CHATML, "<think>x</think>y") as (server, _, _):
        message = server.answer()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "<think>x</think>y"}


# -- tool calls ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "text"), [(V3, V3_TEXT), (R1, f"</think>{V3_TEXT}"), (V31, V31_TEXT)]
)
@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_calls_in_a_message_and_in_a_stream(template: str, text: str, chunk: int) -> None:
    with over(template, text, chunk=chunk) as (server, _, prompts):
        answer = server.answer(tools=TOOLS)
        message, finish = put_together(server.events(tools=TOOLS, tool_choice="auto"))
    assert "### weather" in prompts[0]
    [choice] = answer["choices"]
    assert choice["finish_reason"] == finish == "tool_calls"
    assert choice["message"]["content"] == message["content"] == "I look."
    for calls in (choice["message"]["tool_calls"], message["tool_calls"]):
        assert [c["function"]["name"] for c in calls] == ["weather", "time"]
        assert [c["function"]["arguments"] for c in calls] == [ARGUMENTS, '{"zone": "CET"}']
        assert {c["type"] for c in calls} == {"function"}
        assert len({c["id"] for c in calls}) == 2
        assert all(c["id"].startswith("call_") for c in calls)


def test_arguments_stream_as_they_come() -> None:
    with over(V31, V31_TEXT, chunk=1) as (server, _, _):
        events = server.events(tools=TOOLS)
    calls = [c for e in events[:-1] for c in e["choices"][0]["delta"].get("tool_calls", [])]
    firsts = [i for i, c in enumerate(calls) if "id" in c]
    assert len(firsts) == 2
    assert firsts[1] > 10  # many fragments lie between
    assert [c["index"] for c in calls] == [0] * firsts[1] + [1] * (len(calls) - firsts[1])


def test_only_calls_give_null_content() -> None:
    with over(V31, V31_TEXT.removeprefix("I look.")) as (server, _, _):
        message = server.answer(tools=TOOLS)["choices"][0]["message"]
    assert message["content"] is None
    assert len(message["tool_calls"]) == 2


def test_an_answer_without_calls_is_one_as_always() -> None:
    with over(V3, "It is sunny. ") as (server, _, _):
        choice = server.answer(tools=TOOLS)["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "It is sunny. "}
    assert choice["finish_reason"] == "stop"


def test_a_call_cut_by_max_tokens_says_length() -> None:
    with over(V31, V31_TEXT) as (server, _, _):
        choice = server.answer(tools=TOOLS, max_tokens=30)["choices"][0]
    assert choice["finish_reason"] == "length"
    [call] = choice["message"]["tool_calls"]
    assert ARGUMENTS.startswith(call["function"]["arguments"])


def test_the_engine_stops_when_the_calls_are_made() -> None:
    """V3 leaves the last call open; what a model makes up after it is not wanted."""
    text = (
        V3_TEXT.removesuffix(END) + "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>sunny and so on"
    )
    with over(V3, text) as (server, engine, _):
        choice = server.answer(tools=TOOLS)["choices"][0]
    assert len(choice["message"]["tool_calls"]) == 2
    assert choice["finish_reason"] == "tool_calls"
    assert engine.cancelled == [1]


def test_one_call_where_parallel_ones_are_not_wanted() -> None:
    with over(V31, V31_TEXT) as (server, engine, _):
        choice = server.answer(tools=TOOLS, parallel_tool_calls=False)["choices"][0]
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "tool_calls"
    assert engine.cancelled == [1]


@pytest.mark.parametrize(
    ("template", "choice", "text"),
    [
        (V3, NAMED, f'{{"city": "Paris"}}\n```{CALL_END}{END}'),
        (V31, NAMED, f'{{"city": "Paris"}}{CALL_END}{END}'),
        (V3, "required", f'weather\n```json\n{{"city": "Paris"}}\n```{CALL_END}{END}'),
        (V31, "required", f'weather{SEP}{{"city": "Paris"}}{CALL_END}{END}'),
        (R1, NAMED, f'{{"city": "Paris"}}\n```{CALL_END}{END}'),
    ],
)
def test_a_call_that_must_be_made_is_made(template, choice, text) -> None:
    with over(template, text) as (server, _, prompts):
        answer = server.answer(tools=TOOLS, tool_choice=choice)["choices"][0]
        message, _ = put_together(server.events(tools=TOOLS, tool_choice=choice))
    assert prompts[0].rstrip("\n").endswith(("weather\n```json", SEP, CALL))
    for calls in (answer["message"]["tool_calls"], message["tool_calls"]):
        [call] = calls
        assert call["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}


def test_no_tools_for_a_model_that_must_not_call() -> None:
    with over(V31, V31_TEXT) as (server, _, prompts):
        choice = server.answer(tools=TOOLS, tool_choice="none")["choices"][0]
    assert "weather" not in prompts[0]
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"


def test_a_conversation_with_results_goes_round() -> None:
    """What a client was sent, it sends back; the prompt then holds the call and its result."""
    with over(V3, V3_TEXT, "Sunny.") as (server, _, prompts):
        ask = {"role": "user", "content": "Weather?"}
        message = server.answer(messages=[ask], tools=TOOLS)["choices"][0]["message"]
        results = [
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "content": [{"type": "text", "text": "20"}],
            }
            for call in message["tool_calls"]
        ]
        answer = server.answer(messages=[ask, message, *results], tools=TOOLS)
    assert answer["choices"][0]["message"]["content"] == "Sunny."
    written = V3_TEXT.removeprefix("I look.\n")
    assert f"I look.<｜end▁of▁sentence｜><｜Assistant｜>{written}" in prompts[1]
    assert prompts[1].count("<｜tool▁output▁begin｜>20<｜tool▁output▁end｜>") == 2


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"tool_choice": "required"}, "the request has no tools"),
        ({"tools": TOOLS, "tool_choice": {"function": {"name": "x"}}}, "'x', which is not in"),
        ({"tools": TOOLS, "tool_choice": "must"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0]"),
    ],
)
def test_choices_that_make_no_sense(body: dict, message: str) -> None:
    with over(V3, "x") as (server, _, _):
        response = server.chat(**body)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


def test_tools_are_refused_where_their_format_is_not_known() -> None:
    with over(CHATML, "x") as (server, _, _):
        response = server.chat(tools=TOOLS)
    assert response.status_code == 400
    assert "this model's tool call format is not supported" in response.text
    assert json.loads(response.text)["error"]["type"] == "invalid_request_error"


def test_arguments_sent_back_as_an_object() -> None:
    """Some clients parse a call's arguments and send the object."""
    function = {"name": "weather", "arguments": {"city": "Paris"}}
    call = {"id": "call_1", "type": "function", "function": function}
    history = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    with over(V3, "Sunny.", "Sunny.") as (server, _, prompts):
        server.answer(messages=history, tools=TOOLS)
        call["function"] = function | {"arguments": '{"city": "Paris"}'}
        server.answer(messages=history, tools=TOOLS)
    assert prompts[0] == prompts[1]
    assert '{"city": "Paris"}' in prompts[0]


def test_reasoning_under_its_other_name() -> None:
    template = "{% for m in messages %}<{{ m.reasoning_content }}>{{ m.content }}{% endfor %}"
    with over(template, "x") as (server, _, prompts):
        server.answer(messages=[{"role": "assistant", "content": "a", "reasoning": "hm"}, HELLO])
    assert prompts[0].endswith("<hm>a<>Hello")


def test_a_tool_that_returned_nothing() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    history = [HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    with over(V3, "x", "x") as (server, _, prompts):
        for content in (None, ""):
            result = {"role": "tool", "tool_call_id": "a", "content": content}
            server.answer(messages=[*history, result], tools=TOOLS)
    assert prompts[0] == prompts[1]


BEGUN = [HELLO, {"role": "assistant", "content": "It is"}]


def test_the_last_message_is_continued() -> None:
    with over(CHATML, " fine.") as (server, _, prompts):
        body = {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": False}
        message = server.answer(**body)["choices"][0]["message"]
    assert prompts[0].endswith("<|im_start|>assistant\nIt is")
    assert message["content"] == " fine."


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"add_generation_prompt": False}, "only be false with continue_final_message"),
        (
            {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": True},
            "contradict",
        ),
        ({"messages": [HELLO], "continue_final_message": True}, "needs a last message"),
        (
            {
                "messages": BEGUN,
                "continue_final_message": True,
                "tools": TOOLS,
                "tool_choice": "required",
            },
            "a required tool call contradict",
        ),
    ],
)
def test_continuations_that_make_no_sense(body: dict, says: str) -> None:
    with over(V3, "x") as (server, _, _):
        response = server.chat(**body)
    assert response.status_code == 400
    assert says in response.json()["error"]["message"]
