"""What a request says of its answer's form, as the texts that its answers may be."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from gguf_mtp.errors import RequestError
from gguf_mtp.server.plan import AnswerPlan, plan_chat, plan_completion
from gguf_mtp.server.schemas import ChatRequest, CompletionRequest
from tests.support.chat_formats import CHATML, R1, V3, V31
from tests.support.scripted import Answer, ByteVocab, ScriptedEngine
from tests.support.serving import served_of

ENGINE = ScriptedEngine(lambda *_: Answer(""))
SERVED = {name: served_of(ENGINE, t) for name, t in (("v3", V3), ("v31", V31), ("r1", R1))}
SERVED["plain"] = served_of(ENGINE, CHATML)
END = 257
CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get", "parameters": CITY}},
    {"type": "function", "function": {"name": "get_all"}},
]


def plan_of(template: str = "plain", **body: Any) -> AnswerPlan:
    body.setdefault("messages", [{"role": "user", "content": "Hi"}])
    return plan_chat(SERVED[template], ChatRequest.model_validate(body))


def takes(plan: AnswerPlan, text: str) -> bool:
    """Whether an answer may be `text` and end there."""
    constraint = plan.constrain()
    assert constraint
    constraint.commit(ByteVocab().tokenize(text, add_special=False))
    mask = constraint.allowed(())
    return constraint.failure is None and (mask is None or bool(mask[END]))


PERSON = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
FORMATS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        {"response_format": {"type": "json_object"}},
        ["{}", '{"a": [1, null]}'],
        ["[]", "", "{", "{} ", "x{}"],
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": PERSON}}},
        ['{"n": 5}', '{"n": 5, "more": "x"}'],
        ["{}", '{"n": "5"}', '{"n": 5'],
    ),
    ({"response_format": {"type": "json_object", "schema": PERSON}}, ['{"n":5}'], ["{}"]),
    ({"json_schema": {"enum": ["a", 1]}}, ['"a"', "1"], ["a", "2"]),
    ({"json_schema": True}, ["[1]", "null"], ["nul"]),
    ({"grammar": 'root ::= "yes" | "no" "!"*'}, ["yes", "no!!"], ["maybe", "yes!"]),
    ({"grammar": '%llguidance {}\nstart: "yes" /[!?]/'}, ["yes?"], ["yes"]),
    ({"guided_grammar": 'root ::= "yes"'}, ["yes"], ["no"]),
    ({"guided_json": json.dumps(PERSON)}, ['{"n": 5}'], ["{}"]),
    ({"guided_json": PERSON}, ['{"n": 5}'], ["{}"]),
    ({"guided_regex": r"a/b\d{2}[/]\\/\n"}, ["a/b12/\\/\n"], ["a/b1/\\/\n", "a/b12"]),
    ({"guided_choice": ["a", "ab", 'q"\n']}, ["a", "ab", 'q"\n'], ["b", "abb"]),
    ({"structured_outputs": {"json": PERSON}}, ['{"n": 5}'], ["{}"]),
    ({"structured_outputs": {"json_object": True}}, ["{}"], ["1"]),
    ({"structured_outputs": {"regex": "x+"}}, ["xx"], [""]),
    ({"structured_outputs": {"choice": ["x"]}}, ["x"], ["y"]),
    ({"structured_outputs": {"grammar": 'root ::= "x"'}}, ["x"], ["y"]),
]


@pytest.mark.parametrize(("body", "members", "others"), FORMATS)
def test_every_spelling_of_a_form(
    body: dict[str, Any], members: list[str], others: list[str]
) -> None:
    chat = plan_of(**body)
    completion = plan_completion(
        SERVED["plain"], CompletionRequest.model_validate({"prompt": "x"} | body)
    )
    for plan in (chat, completion):
        assert [text for text in members if not takes(plan, text)] == []
        assert [text for text in others if takes(plan, text)] == []


def test_nothing_is_asked_nothing_is_bound() -> None:
    assert plan_of().constrain() is None
    assert plan_of(response_format={"type": "text"}).constrain() is None
    assert plan_of("v31", tools=TOOLS).constrain() is None
    assert plan_of("v31", tools=TOOLS, tool_choice="none").constrain() is None


def test_strict_is_the_default_and_can_be_given_up() -> None:
    def asked(strict: bool | None) -> dict[str, Any]:
        inner = {"name": "x", "strict": strict, "schema": {"type": "array", "uniqueItems": True}}
        return {"type": "json_schema", "json_schema": inner}

    for strict in (True, None):
        with pytest.raises(RequestError, match="uniqueItems"):
            plan_of(response_format=asked(strict))
    assert takes(plan_of(response_format=asked(False)), "[1, 1]")


def test_every_answer_obeys_a_constraint_of_its_own() -> None:
    plan = plan_of(guided_choice=["ab"], n=2)
    first, second = plan.constrain(), plan.constrain()
    first.commit([97])
    assert list(first.allowed(()).nonzero()[0]) == [98]
    assert list(second.allowed(()).nonzero()[0]) == [97]


def test_reasoning_is_free_and_what_follows_is_not() -> None:
    body = {"response_format": {"type": "json_object"}}
    plan = plan_of("r1", **body)
    assert plan.parsing.thinks
    assert takes(plan, 'I think {"x</think>\n\n{}')
    assert takes(plan, "not done yet")  # nothing says how long it may think
    assert not takes(plan, "done</think>hello")
    thinking = plan_of("v31", chat_template_kwargs={"thinking": True}, **body)
    assert takes(thinking, "hm</think>{}")
    plain = plan_of("v31", **body)
    assert takes(plain, "{}")
    assert not takes(plain, "hm</think>{}")


def test_a_model_that_opens_its_reasoning_itself_may_or_may_not() -> None:
    """As R1's first templates left it to the model, and Qwen's do."""
    assert R1.endswith("<think>\n{% endif %}")
    template = R1.replace("<think>\n{% endif %}", "{% endif %}")
    served = SERVED["r1"]
    model = dataclasses.replace(served.model, chat_template=template)
    SERVED["opens"] = dataclasses.replace(served, model=model)
    plan = plan_of("opens", response_format={"type": "json_object"})
    assert plan.parsing.thinks is False
    assert takes(plan, '<think>{"a": [1</think>\n{}')
    assert takes(plan, "{}")
    assert takes(plan, "<think>not done yet")
    assert not takes(plan, "<think>x</think>hello")
    assert not takes(plan, "x<think></think>{}")
    constraint = plan.constrain()
    opening = ByteVocab().tokenize("<think>", add_special=False)
    assert sorted(constraint.allowed(()).nonzero()[0]) == [ord("{"), *opening]
    assert constraint.allowed(opening) is None
    assert END not in constraint.allowed([ord("{")]).nonzero()[0]
    constraint.commit([])
    assert sorted(constraint.allowed(()).nonzero()[0]) == [ord("{"), *opening]


V31_ONE = f'get{SEP}{{"city": "Rome"}}{CALL_END}'
V31_TWO = f"{V31_ONE}{CALL}get_all{SEP}{{}}{CALL_END}{CALLS_END}"
V3_ONE = f'get\n```json\n{{"city": "Rome"}}\n```{CALL_END}'
V3_TWO = f"{V3_ONE}\n{CALL}function{SEP}get_all\n```json\n{{}}\n```{CALL_END}{CALLS_END}"


@pytest.mark.parametrize(
    ("template", "one", "two"), [("v31", V31_ONE, V31_TWO), ("v3", V3_ONE, V3_TWO)]
)
def test_a_demanded_call_is_written_as_the_template_writes_it(
    template: str, one: str, two: str
) -> None:
    plan = plan_of(template, tools=TOOLS, tool_choice="required")
    assert takes(plan, one + CALLS_END)
    assert takes(plan, two)
    assert not takes(plan, one)  # the calls are not closed
    assert not takes(plan, one.replace("get", "got") + CALLS_END)
    assert not takes(plan, one.replace("Rome", "Rome is too long") + CALLS_END)
    assert not takes(plan, one.replace('"city"', '"town"') + CALLS_END)
    assert not takes(plan, one.replace("Rome", "x").replace(CALL_END, "") + CALLS_END)
    assert not takes(plan, "Hello" + one + CALLS_END)
    single = plan_of(template, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert takes(single, one + CALLS_END)
    assert not takes(single, two)


def test_a_marker_is_its_token_and_not_its_spelling() -> None:
    constraint = plan_of("v31", tools=TOOLS, tool_choice="required").constrain()
    constraint.commit(ByteVocab().tokenize(f'get{SEP}{{"city": "x"}}', add_special=False))
    [token] = constraint.allowed(()).nonzero()[0]
    assert ByteVocab().text([token]) == CALL_END


@pytest.mark.parametrize(
    ("template", "one"),
    [("v31", f'{{"city": "x"}}{CALL_END}'), ("v3", f'{{"city": "x"}}\n```{CALL_END}')],
)
def test_a_named_function_gets_its_arguments(template: str, one: str) -> None:
    named = {"type": "function", "function": {"name": "get"}}
    plan = plan_of(template, tools=TOOLS, tool_choice=named)
    assert takes(plan, one + CALLS_END)
    assert not takes(plan, one.replace("city", "town") + CALLS_END)


def test_with_tools_on_offer_the_answer_is_a_call_or_of_its_form() -> None:
    plan = plan_of("v31", tools=TOOLS, response_format={"type": "json_object"})
    assert takes(plan, '{"a": 1}')
    assert takes(plan, f"{CALLS}{CALL}{V31_TWO}")
    assert not takes(plan, "Hello")
    demanded = plan_of(
        "v31", tools=TOOLS, tool_choice="required", response_format={"type": "json_object"}
    )
    assert takes(demanded, V31_TWO)
    assert not takes(demanded, '{"a": 1}')


def test_what_is_wrong_with_a_tool_says_which_and_where() -> None:
    def message(parameters: dict[str, Any], strict: bool | None = None) -> str:
        tool = {"name": "f", "parameters": parameters, "strict": strict}
        tools = [TOOLS[0], {"type": "function", "function": tool}]
        with pytest.raises(RequestError) as caught:
            plan_of("v31", tools=tools, tool_choice="required")
        return str(caught.value)

    place = "tools[1].function.parameters"
    assert message({"properties": {"a": {"type": "strin"}}}) == (
        f"{place}: at /properties/a: Invalid type: strin"
    )
    assert message({"type": "array"}) == f"{place} are of type 'array', but must be an object"
    assert message({"properties": {"a": {"uniqueItems": True}}}, strict=True).startswith(
        f"{place}: at /properties/a: Unimplemented keys"
    )


def test_a_grammar_and_tools_exclude_each_other() -> None:
    with pytest.raises(RequestError, match="guided_choice and tools cannot be combined"):
        plan_of("v31", tools=TOOLS, guided_choice=["a"])
    assert takes(plan_of("v31", tools=TOOLS, tool_choice="none", guided_choice=["a"]), "a")


def test_the_fewest_tokens_hold_off_every_end() -> None:
    plan = plan_of(min_tokens=2, stop_token_ids=[65, 66])
    assert plan.options.stop_tokens == {65, 66}
    constraint = plan.constrain()
    assert list((~constraint.allowed(())).nonzero()[0]) == [65, 66, END]
    assert constraint.allowed([1, 2]) is None
