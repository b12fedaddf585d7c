"""Conversations as each model's template wants them; nothing of one is ever dropped silently."""

from __future__ import annotations

import pytest

from gguf_mtp.chat.conversation import ChatTemplate, Turns
from gguf_mtp.errors import RequestError
from tests.support.chat_formats import BOS, CHATML, EOS, R1, V3, V31

ASK = {"role": "user", "content": "Weather?"}
FUNCTION = {"name": "weather", "arguments": '{"city": "Paris", "days": 2}'}
CALL = {"id": "call_1", "type": "function", "function": FUNCTION}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
V3_CALL = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    '{"city": "Paris", "days": 2}\n```<｜tool▁call▁end｜>'
)
V3_RESULT = (
    "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>sunny"
    "<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"
)


def text(template: str, *messages, **options) -> str:
    return ChatTemplate(template, BOS, EOS).prompt(Turns(messages, **options)).text


def test_plain_conversations() -> None:
    system = {"role": "system", "content": "Short."}
    said = {"role": "assistant", "content": "<think>\nhm\n</think>Rain."}
    assert text(V3, system, ASK) == f"{BOS}Short.<｜User｜>Weather?<｜Assistant｜>"
    assert text(R1, ASK, said, ASK) == (
        f"{BOS}<｜User｜>Weather?<｜Assistant｜>Rain.{EOS}<｜User｜>Weather?<｜Assistant｜><think>\n"
    )
    assert text(CHATML, ASK) == "<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n"


def test_the_thinking_switch() -> None:
    template = ChatTemplate(V31, BOS, EOS)
    plain = template.prompt(Turns([ASK]))
    assert (plain.text[-15:], plain.thinks) == ("<think></think>", False)
    thinking = template.prompt(Turns([ASK], variables={"thinking": True}))
    assert (thinking.text[-7:], thinking.thinks) == ("<think>", True)
    assert ChatTemplate(R1, BOS, EOS).prompt(Turns([ASK])).thinks
    assert not ChatTemplate(V3, BOS, EOS).can_think


def test_past_calls_in_every_format() -> None:
    """Arguments are text for V3 and R1, objects for V3.1."""
    assert text(V3, ASK, CALLS, RESULT) == (
        f"{BOS}<｜User｜>Weather?<｜Assistant｜>{V3_CALL}{V3_RESULT}"
    )
    assert f"{V3_CALL}<｜tool▁calls▁end｜>{EOS}{V3_RESULT}" in text(R1, ASK, CALLS, RESULT)
    assert text(V31, ASK, CALLS, RESULT).endswith(
        "<think></think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
        f'{{"city": "Paris", "days": 2}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>{EOS}'
        "<｜tool▁output▁begin｜>sunny<｜tool▁output▁end｜>"
    )


@pytest.mark.parametrize("template", [V3, R1, V31])
def test_text_beside_calls_is_kept(template: str) -> None:
    """V3's template shows either: there the message becomes two."""
    rendered = text(template, ASK, CALLS | {"content": "I look."}, RESULT)
    assert rendered.index("I look.") < rendered.index("<｜tool▁calls▁begin｜>")
    assert text(template, ASK, CALLS | {"content": ""}) == text(template, ASK, CALLS)


def test_what_a_template_cannot_show_is_refused() -> None:
    with pytest.raises(RequestError, match="does not support tool calls"):
        text(CHATML, ASK, CALLS)
    users_only = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(RequestError, match="does not support tool results"):
        text(users_only, ASK, RESULT)
    assert "tool\nsunny" in text(CHATML, ASK, RESULT)
    with pytest.raises(RequestError, match="this model's tool call format is not supported"):
        text(CHATML, ASK, tools=[TOOL])


def test_arguments_that_are_not_json_are_refused_where_objects_are_needed() -> None:
    broken = CALLS | {"tool_calls": [CALL | {"function": FUNCTION | {"arguments": '{"city": '}}]}
    assert '{"city": \n' in text(V3, ASK, broken)
    assert "{}" in text(V31, ASK, broken), "a call that was cut is shown as far as it came"
    cut = CALLS | {"tool_calls": [CALL | {"function": FUNCTION | {"arguments": '{"city": "Ber'}}]}
    assert '{"city": "Ber"}' in text(V31, ASK, cut)
    broken["tool_calls"][0]["function"]["arguments"] = "Berlin"
    with pytest.raises(RequestError, match="arguments of the call to weather are not JSON"):
        text(V31, ASK, broken)


@pytest.mark.parametrize("template", [V3, R1, V31])
def test_tools_are_told_where_the_template_does_not(template: str) -> None:
    system = {"role": "system", "content": "Short."}
    rendered = text(template, system, ASK, tools=[TOOL])
    assert rendered.startswith(f"{BOS}Short.\n\n## Tools")
    assert "### weather" in rendered
    assert text(template, ASK, tools=[TOOL]).startswith(f"{BOS}## Tools")


def test_tools_go_to_a_template_that_shows_them() -> None:
    shows = "{{ tools | tojson if tools else '' }}<｜tool▁calls▁begin｜>{{ messages[-1].content }}"
    assert text(shows, ASK, tools=[TOOL]).startswith('[{"type": "function"')
    assert "## Tools" not in text(shows, ASK, tools=[TOOL])


@pytest.mark.parametrize(("template", "before"), [(V3, "function<｜tool▁sep｜>"), (V31, "")])
def test_a_call_that_must_be_made_is_begun_in_the_prompt(template: str, before: str) -> None:
    any_tool = ChatTemplate(template, BOS, EOS).prompt(Turns([ASK], [TOOL], must_call=True))
    assert any_tool.begun == f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{before}"
    assert any_tool.text.endswith(f"{any_tool.begun}")
    turns = Turns([ASK], [TOOL], must_call=True, call_name="weather")
    one_tool = ChatTemplate(template, BOS, EOS).prompt(turns)
    assert f"{before}weather" in one_tool.begun
    assert one_tool.text.endswith(one_tool.begun)


def test_reasoning_is_closed_before_a_call_that_must_be_made() -> None:
    turns = Turns([ASK], [TOOL], must_call=True, variables={"thinking": True})
    prompt = ChatTemplate(V31, BOS, EOS).prompt(turns)
    assert prompt.text.endswith(f"<｜Assistant｜><think></think>{prompt.begun}")
    assert not prompt.thinks


def test_the_developer_is_the_system_where_a_template_knows_none() -> None:
    developer = {"role": "developer", "content": "Short."}
    assert text(V3, developer, ASK).startswith(f"{BOS}Short.<｜User｜>")
    knows = "{{ 'developer: ' + messages[0].content if messages[0].role == 'developer' }}"
    assert text(knows, developer) == "developer: Short."


def test_a_model_without_a_template() -> None:
    with pytest.raises(RequestError, match="has no chat template"):
        ChatTemplate(None, BOS, EOS).prompt(Turns([ASK]))


NO_NONE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments }}]"
    "{% endfor %}|{% endfor %}"
)
NEEDS_TOOLS = "{% if not tools %}{{ raise_exception('no tools') }}{% endif %}" + NO_NONE


@pytest.mark.parametrize("template", [NO_NONE, NEEDS_TOOLS])
def test_no_template_prints_none_for_a_call_without_text(template: str) -> None:
    with pytest.raises(RequestError, match="tool call format is not supported"):
        text(template, ASK, tools=[TOOL])
    shown = text("{# <｜tool▁calls▁begin｜> #}" + template, ASK, CALLS, RESULT, tools=[TOOL])
    assert "assistant: [weather " in shown
    assert "None" not in shown


@pytest.mark.parametrize(("template", "end"), [(CHATML, "assistant\n"), (V3, "<｜Assistant｜>")])
def test_the_last_message_is_continued(template: str, end: str) -> None:
    begun = {"role": "assistant", "content": "It will "}
    assert text(template, ASK, begun, continues=True).endswith(f"{end}It will ")
    assert text(template, ASK, begun, continues=True).count(end) == 1


@pytest.mark.parametrize("last", [ASK, CALLS, {"role": "assistant", "content": ""}])
def test_what_cannot_be_continued_is_refused(last: dict) -> None:
    with pytest.raises(RequestError, match="continue_final_message needs a last message"):
        text(V3, last, continues=True)
    with pytest.raises(RequestError, match="continue_final_message needs a last message"):
        text(CHATML, continues=True)
