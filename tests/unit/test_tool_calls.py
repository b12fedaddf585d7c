"""Tool calls out of DeepSeek's texts: the same calls, whatever the pieces."""

from __future__ import annotations

import json
import random

import pytest

from gguf_mtp.chat.tool_calls import (
    V3,
    V31,
    CallArguments,
    CallStart,
    Content,
    Event,
    ToolCallParser,
)

WEATHER = '{"city": "Paris", "note": "a \\"}\\" and {"}'
CALL, SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def v3(name: str, rest: str) -> str:
    return f"{CALL}function{SEP}{name}\n{rest}{CALL_END}"


def v31(name: str, rest: str) -> str:
    return f"{CALL}{name}{SEP}{rest}{CALL_END}"


V3_CALL = v3("weather", f"```json\n{WEATHER}\n```")
V3_TIME = v3("time", '```json\n{"zone": {"h": 1}}\n```')
V31_CALL = v31("weather", WEATHER)
V31_TIME = v31("time", '{"zone": {"h": 1}}')
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BOTH = [("weather", WEATHER), ("time", '{"zone": {"h": 1}}')]


def parse(
    text: str, sizes: list[int], max_calls: int | None = None
) -> tuple[str, list[tuple[str, str]], bool]:
    """Content, calls as (name, arguments), and whether the parser wants no more."""
    parser = ToolCallParser(max_calls)
    events: list[Event] = []
    pos = 0
    for size in [*sizes, len(text)]:
        events += parser.add(text[pos : pos + size])
        pos += size
    done = parser.is_done
    events += parser.finish()
    content, calls = "", []
    for event in events:
        if isinstance(event, Content):
            assert not calls, "content after a call"
            content += event.text
        elif isinstance(event, CallStart):
            assert event.number == len(calls)
            calls.append((event.name, ""))
        else:
            assert event.number == len(calls) - 1
            assert event.text
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    assert parser.n_calls == len(calls)
    return content, calls, done


CASES = [
    # V3 and R1; the last call of a message is left open in V3's own template
    (f"{BEGIN}{V3_CALL}\n{V3_TIME}{END}", "", BOTH, True),
    (f"{BEGIN}{V3_CALL}", "", BOTH[:1], False),
    (f"I look.\n{BEGIN}{V3_CALL}{END}", "I look.", BOTH[:1], True),
    (f"{BEGIN}{V3_CALL}<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>sunny", "", BOTH[:1], True),
    # V3.1
    (f"{BEGIN}{V31_CALL}{V31_TIME}{END}", "", BOTH, True),
    (f"{BEGIN}{V31_CALL}<｜tool▁output▁begin｜>sunny", "", BOTH[:1], True),
    (f"{V31_CALL}", "", BOTH[:1], False),  # without the opening of all calls
    # a tool that is called "function"
    (BEGIN + v31("function", ' {"a": 1}') + END, "", [("function", '{"a": 1}')], True),
    # no arguments, in braces and without
    (BEGIN + v31("now", "{}") + END, "", [("now", "{}")], True),
    (BEGIN + v31("now", "") + END, "", [("now", "{}")], True),
    (BEGIN + v3("now", "```json\n\n```") + END, "", [("now", "{}")], True),
    # a missing fence, more after the object, a call that never ends, one without a name
    (BEGIN + v3("a", '{"b": 1}```\nand so on') + END, "", [("a", '{"b": 1}')], True),
    (BEGIN + v31("a", '{"b": "unclo') + END, "", [("a", '{"b": "unclo')], True),
    (BEGIN + v31("", "{}") + V31_TIME + END, "", BOTH[1:], True),
    # cut by max_tokens: in the arguments, in their end, before them
    (f'{BEGIN}{CALL}a{SEP}{{"b": ', "", [("a", '{"b": ')], False),
    (f'{BEGIN}{CALL}a{SEP}{{"b": "<｜tool▁ca', "", [("a", '{"b": "<｜tool▁ca')], False),
    (f"{BEGIN}{CALL}a{SEP}", "", [("a", "")], False),
    # no call at all
    ("Sunny, 20 °C.\n\nBye \n", "Sunny, 20 °C.\n\nBye \n", [], False),
    ("A tag: <｜tool▁ca", "A tag: <｜tool▁ca", [], False),
    ("", "", [], False),
]


@pytest.mark.parametrize(("text", "content", "calls", "done"), CASES)
def test_calls_do_not_depend_on_the_pieces(
    text: str, content: str, calls: list[tuple[str, str]], done: bool
) -> None:
    rng = random.Random(2)
    pieces = [[len(text)], [1] * len(text)]
    pieces += [[rng.randint(1, 9) for _ in text] for _ in range(20)]
    for sizes in pieces:
        assert parse(text, sizes) == (content, calls, done)


def test_the_name_comes_first_and_arguments_as_they_grow() -> None:
    parser = ToolCallParser()
    assert parser.add(f"{BEGIN}{CALL}function{SEP}wea") == []
    assert parser.add("ther\n```json\n") == []
    assert parser.add('{"city": "Pa') == [CallStart(0, "weather"), CallArguments(0, '{"city": "Pa')]
    assert parser.add('ris"') == [CallArguments(0, 'ris"')]
    assert parser.add("}\n```" + CALL_END + "\n") == [CallArguments(0, "}")]
    assert parser.add(CALL + "time" + SEP + "{}") == [
        CallStart(1, "time"),
        CallArguments(1, "{}"),
    ]


def test_one_call_is_enough_when_only_one_is_wanted() -> None:
    _, calls, done = parse(f"{BEGIN}{V31_CALL}{V31_TIME}{END}", [3] * 99, max_calls=1)
    assert (calls, done) == (BOTH[:1], True)


@pytest.mark.parametrize("form", [V3, V31])
@pytest.mark.parametrize("name", [None, "weather"])
def test_an_opening_is_the_beginning_of_a_call(form, name) -> None:
    """What an answer is made to begin with, and what the model adds, are one call."""
    whole = form.opening("weather") + WEATHER + form.after_arguments
    assert whole.startswith(form.opening(name))
    assert parse(whole, [4] * 99)[1] == BOTH[:1]


@pytest.mark.parametrize(("form", "call"), [(V3, V3_CALL), (V31, V31_CALL)])
def test_instructions_show_every_tool_and_the_format_that_is_parsed(form, call) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string", "description": "Où?"}}}
    weather = {"name": "weather", "description": "Now.", "parameters": schema}
    tools = [{"type": "function", "function": f} for f in (weather, {"name": "time"})]
    text = form.instructions(tools)
    for part in ("weather", "Now.", json.dumps(schema, ensure_ascii=False), "### time", "Où?"):
        assert part in text
    shown = call.replace("weather", "NAME").replace(WEATHER, "ARGUMENTS")
    assert f"{BEGIN}{shown}{END}" in text
