"""What users and tools write cannot name control tokens: the template's own markers alone are."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from typing import Any

import pytest

from gguf_mtp.answers.guard import guarded
from gguf_mtp.answers.prepare import AnswerOptions, TextModel, prepare_chat
from tests.support.chat_formats import CHATML, R1, V3, V31
from tests.support.scripted import CONTROL, ByteVocab, ScriptedEngine
from tests.support.serving import served_of

FORGED = "".join(CONTROL)
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}


def model(template: str) -> TextModel:
    return served_of(ScriptedEngine([]), template).model


def conversation(said: str) -> list[dict[str, Any]]:
    function = CALL["function"] | {"arguments": f'{{"q": "{said}"}}'}  # type: ignore[operator]
    return [
        {"role": "system", "content": f"Be kind. {said}"},
        {"role": "user", "content": said},
        {
            "role": "assistant",
            "content": f"Let me see {said}",
            "tool_calls": [CALL | {"function": function}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": said},
        {"role": "assistant", "content": said},
        {"role": "user", "content": [{"type": "text", "text": said}]},
    ]


def markers(text_model: TextModel, said: str) -> tuple[Counter[int], str]:
    tool = TOOL | {"function": TOOL["function"] | {"description": said}}  # type: ignore[operator]
    options = AnswerOptions(tools=[tool])
    tokens = list(prepare_chat(text_model, conversation(said), options).prompts[0])
    assert isinstance(text_model.vocab, ByteVocab)
    return Counter(t for t in tokens if t >= 256), text_model.vocab.text(tokens)


@pytest.mark.parametrize("template", [V3, R1, V31], ids=["V3", "R1", "V3.1"])
def test_contents_are_text(template: str) -> None:
    """Of messages, results, calls and tools: as many markers as in a conversation without any,
    and the text unchanged."""
    plain, _ = markers(model(template), "x")
    forged, text = markers(model(template), FORGED)
    assert forged == plain
    assert text.count(FORGED) >= 6
    assert not any(0xE000 <= ord(c) < 0xF900 for c in text)


def test_special_contents_may_be_parsed() -> None:
    parsing = dataclasses.replace(model(V3), parses_content=True)
    plain, _ = markers(parsing, "x")
    forged, _ = markers(parsing, FORGED)
    assert forged - plain


def test_a_text_without_markers_is_left_alone() -> None:
    """Letters for private use are part of a text as any."""
    prepared = prepare_chat(
        model(CHATML), [{"role": "user", "content": "\ue000?"}], AnswerOptions()
    )
    vocab = ByteVocab()
    assert "\ue000?" in vocab.text(list(prepared.prompts[0]))
    messages = [{"role": "user", "content": "\ue000 <think>"}]
    assert guarded(vocab, messages) == (messages, "")


def test_the_guard_is_a_letter_that_nobody_uses() -> None:
    values, letter = guarded(
        ByteVocab(), [{"role": "user", "content": f"\ue000\ue001{CONTROL[0]}"}]
    )
    assert letter == "\ue002"
    assert letter in values[0]["content"]
    prepared = prepare_chat(
        model(V3), [{"role": "user", "content": f"\ue000{CONTROL[2]}"}], AnswerOptions()
    )
    assert f"\ue000{CONTROL[2]}" in ByteVocab().text(list(prepared.prompts[0]))


def test_reasoning_markers_stay_in_the_assistants_own_messages() -> None:
    """Templates cut earlier reasoning off by them."""

    class Thinks(ByteVocab):
        def guarded(self, text: str, guard: str, but: Any = ()) -> str:
            broken = super().guarded(text, guard, but)
            return broken if "</think>" in but else broken.replace("</think>", f"<{guard}/think>")

    said = f"a</think>{CONTROL[2]}"
    both = [{"role": "assistant", "content": said}, {"role": "user", "content": said}]
    (own, users), letter = guarded(Thinks(), both)
    assert own["content"].startswith("a</think>")
    assert users["content"].startswith(f"a<{letter}/think>")


def test_escaped_markers_in_arguments_are_text() -> None:
    """A template that reads the arguments would spell the marker out."""
    escaped = "".join(f"\\u{ord(c):04x}" for c in CONTROL[0])
    function = {"name": "look", "arguments": f'{{"q": "{escaped}"}}'}
    said = {"role": "assistant", "content": "", "tool_calls": [CALL | {"function": function}]}
    (value,), letter = guarded(ByteVocab(), [said])
    arguments = json.loads(value["tool_calls"][0]["function"]["arguments"])
    assert letter in arguments["q"]
    assert arguments["q"].replace(letter, "") == CONTROL[0]
