"""A session from Python: stop strings, tools, reasoning, developer roles and several answers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gguf_mtp
from gguf_mtp.answers.prepare import AnswerOptions
from gguf_mtp.chat.tool_calls import CallArguments, CallStart
from gguf_mtp.demo import demo_model
from gguf_mtp.errors import RequestError
from gguf_mtp.loading.loader import LoadOptions
from gguf_mtp.params import SamplingParams
from gguf_mtp.session import Piece, Session
from tests.support.chat_formats import R1, V31

pytestmark = pytest.mark.native

GREEDY = SamplingParams(temperature=0)
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
ITALY = [{"role": "user", "content": "What is the capital of Italy?"}]
PARIS, ROME = "The capital of France is Paris.", "The capital of Italy is Rome."
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Bern", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    options = LoadOptions(n_ctx=512, n_seq=2, n_threads=1, draft_min=2, draft_max=2)
    with gguf_mtp.load(demo_model(), options) as loaded:
        yield loaded


def with_template(session: Session, template: str, monkeypatch: pytest.MonkeyPatch) -> Session:
    monkeypatch.setattr(session, "text", dataclasses.replace(session.text, chat_template=template))
    return session


def said(pieces: Iterator[Piece]) -> tuple[str, Piece]:
    whole = list(pieces)
    return "".join(piece.text for piece in whole), whole[-1]


@pytest.mark.parametrize("n_seq", [1, 2])
def test_two_answers_read_in_turn(n_seq: int) -> None:
    options = LoadOptions(n_ctx=256, n_seq=n_seq, n_threads=1)
    with gguf_mtp.load(demo_model(), options) as model:
        texts = ["", ""]
        answers = [model.chat(FRANCE, GREEDY), model.chat(ITALY, GREEDY)]
        for _ in range(100):
            for i, pieces in enumerate(answers):
                texts[i] += next(pieces, Piece()).text
        assert texts == [PARIS, ROME]
        held = model.chat(FRANCE, GREEDY)
        first = next(held).text
        assert said(model.chat(ITALY, GREEDY))[0] == ROME
        assert first + said(held)[0] == PARIS


def test_a_stop_string_ends_the_answer_its_tokens_and_the_request(session: Session) -> None:
    whole = list(session.chat(FRANCE, GREEDY, stop=["France is", "x"]))
    assert "".join(piece.text for piece in whole) == "The capital of "
    last = whole[-1]
    assert last.finish_reason == "stop"
    assert last.stats is not None
    tokens = [token for piece in whole for token in piece.tokens]
    assert b"".join(map(session.vocab.piece, tokens)) == b"The capital of"  # those that are whole
    assert session.engine.is_idle
    assert said(session.chat(FRANCE, GREEDY, stop=" Paris"))[0] == "The capital of France is"
    assert said(session.complete("The capital", GREEDY, 9, stop=["."]))[1].finish_reason


def test_a_bound_on_tokens_is_a_length(session: Session) -> None:
    text, last = said(session.chat(FRANCE, GREEDY, 3))
    assert PARIS.startswith(text)
    assert last.finish_reason == "length"


def test_calls_of_tools_come_as_calls(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_template(session, V31, monkeypatch)
    options = AnswerOptions(tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
    hot = SamplingParams(temperature=1.5, seed=1)
    whole = list(model.chat(FRANCE, hot, 200, options=options))
    assert "".join(piece.text for piece in whole) == ""
    events = [event for piece in whole for event in piece.tool_calls]
    assert events[0] == CallStart(0, "weather")
    arguments = "".join(e.text for e in events if isinstance(e, CallArguments))
    assert json.loads(arguments)["city"] in ("Bern", "Rome")
    assert whole[-1].finish_reason == "tool_calls"
    with pytest.raises(RequestError, match="tool_choice names 'time', which is not in tools"):
        model.chat(FRANCE, options=AnswerOptions(tools=[WEATHER], tool_name="time"))
    assert said(model.chat(FRANCE, GREEDY, tools=[WEATHER]))[1].finish_reason in ("stop", "length")


def test_reasoning_comes_apart(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """R1's prompt opens it; the demo never closes it, so that everything is reasoning."""
    model = with_template(session, R1, monkeypatch)
    whole = list(model.chat(FRANCE, GREEDY, 8))
    assert "".join(piece.text for piece in whole) == ""
    assert "".join(piece.reasoning for piece in whole)


def test_messages_are_taken_as_the_server_takes_them(session: Session) -> None:
    parts = [{"type": "text", "text": "What is the capital of France?"}]
    developer = {"role": "developer", "content": "Be brief."}
    system = {"role": "system", "content": "Be brief."}
    assert session.chat_tokens([{"role": "user", "content": parts}]) == session.chat_tokens(FRANCE)
    assert session.chat_tokens([developer, *FRANCE]) == session.chat_tokens([system, *FRANCE])
    with pytest.raises(RequestError, match=r"messages\[0\] has no content"):
        session.chat([{"role": "user", "content": None}])
    with pytest.raises(RequestError, match="content part of type 'image_url'"):
        session.chat([{"role": "user", "content": [{"type": "image_url"}]}])


def test_a_raw_prompt_with_a_bos_has_one(session: Session) -> None:
    bos = session.vocab.bos
    counts = []
    for prompt in ("The capital", f"{bos}The capital"):
        [last] = [p for p in session.complete(prompt, GREEDY, 1) if p.stats]
        assert last.stats is not None
        counts.append(last.stats.prefill_tokens + last.stats.cached_tokens)
    assert counts[0] == counts[1]


def test_an_answer_that_is_begun_is_continued(session: Session) -> None:
    """The same tokens as the model's own answer after the same beginning."""
    begun = {"role": "assistant", "content": "The capital of"}
    options = AnswerOptions(continue_final_message=True)
    text, _ = said(session.chat([*FRANCE, begun], GREEDY, options=options))
    assert text == " France is Paris."


def test_schema_and_grammar_contradict_each_other(session: Session) -> None:
    with pytest.raises(RequestError, match="json_schema and grammar cannot be combined"):
        session.chat(FRANCE, options=AnswerOptions(json_schema={}, grammar='root ::= "a"'))
    options = AnswerOptions(grammar='root ::= "yes" | "no"')
    assert said(session.chat(FRANCE, GREEDY, options=options))[0] in ("yes", "no")


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ("hi", "messages must be a list like"),
        (["hi"], "messages must be a list like"),
        (None, "messages must be a list like"),
        ([], "messages is empty"),
        ([{"content": "x"}], r"messages\[0\] has no role"),
        ([{"role": "user", "content": 5}], "neither text nor a list"),
        (
            [{"role": "assistant", "tool_calls": [{"name": "f"}]}],
            r"messages\[0\].tool_calls has no function with a name",
        ),
    ],
)
def test_messages_that_are_none_are_a_sentence(
    session: Session, messages: list[dict[str, object]], says: str
) -> None:
    with pytest.raises(RequestError, match=says):
        session.chat(messages)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"stop": "hic"}, "stop is 'hic', but must be a list"),
        ({"draft": "ngram"}, "draft is 'ngram', but must be a list"),
        ({"tool_choice": "none", "tool_name": "f"}, "tool_choice is 'none', but tool_name is 'f'"),
    ],
)
def test_options_that_make_no_sense_are_a_sentence(options: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        AnswerOptions(**options)


def test_tools_without_names_are_a_sentence(session: Session) -> None:
    with pytest.raises(RequestError, match=r"tools\[0\] has no function with a name"):
        session.chat(FRANCE, tools=[{"name": "f"}])


def test_a_last_piece_comes_though_another_answer_has_read_on(session: Session) -> None:
    held = session.chat(FRANCE, GREEDY, stop=["France"])
    next(held)
    assert said(session.chat(ITALY, GREEDY))[0] == ROME
    whole = list(held)
    assert whole[-1].finish_reason == "stop"
    assert whole[-1].stats is not None


def test_a_file_that_lacks_a_key_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without its pre-tokenizer the same prompt has other tokens."""
    options = LoadOptions(n_ctx=256, n_threads=1, draft="off")
    with gguf_mtp.load(demo_model(), options):
        assert not caplog.records
    raw = demo_model().read_bytes()
    without = tmp_path / "without.gguf"
    without.write_bytes(raw.replace(b"tokenizer.ggml.pre", b"tokenizer.ggml.not"))
    with gguf_mtp.load(without, options) as session:
        assert said(session.chat(FRANCE, GREEDY))[0]
    [record] = caplog.records
    assert record.getMessage() == (
        f"{without} lacks tokenizer.ggml.pre: llama.cpp uses defaults, so the text may differ from "
        "the original model's"
    )


def test_a_closed_model_answers_in_a_sentence() -> None:
    model = gguf_mtp.load(demo_model(), LoadOptions(n_ctx=256, n_threads=1))
    pieces = model.chat(FRANCE, GREEDY)
    next(pieces)
    model.close()
    for work in (lambda: next(pieces), lambda: model.chat(ITALY), lambda: model.complete("x")):
        with pytest.raises(RequestError, match="the model is closed"):
            work()
    model.close()


def test_without_a_path_the_demo_answers(caplog: pytest.LogCaptureFixture) -> None:
    """And a context beyond what it was trained for is said."""
    with gguf_mtp.load(options=LoadOptions(n_ctx=2048, n_threads=1)) as model:
        assert said(model.chat(FRANCE, GREEDY))[0] == PARIS
    assert not caplog.messages
    with gguf_mtp.load(options=LoadOptions(n_ctx=2049, n_threads=1)):
        pass
    assert caplog.messages == [
        "a context of 2,049 tokens is longer than the 2,048 that the model was trained for: "
        "beyond them its answers may make no sense"
    ]
