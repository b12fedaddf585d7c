"""Bound answers through the server, from the demo model's own tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from gguf_mtp.answers.prepare import AnswerOptions
from gguf_mtp.demo import demo_model
from gguf_mtp.loading.loader import LoadOptions, load
from gguf_mtp.params import SamplingParams
from gguf_mtp.server.plan import plan_chat
from gguf_mtp.server.schemas import ChatRequest
from gguf_mtp.session import Session
from tests.support.chat_formats import R1, V3, V31
from tests.support.schemas import CITY
from tests.support.serving import Server, served_by, serving

pytestmark = [pytest.mark.native, pytest.mark.server]

TOOLS = [{"type": "function", "function": {"name": n, "parameters": CITY}} for n in ("get", "put")]
HOT = {"temperature": 1.5, "top_p": 1.0, "min_p": 0.0, "max_tokens": 300}


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    options = LoadOptions(n_ctx=1024, n_seq=4, n_threads=1, draft_min=2, draft_max=2)
    with load(demo_model(), options) as loaded:
        yield loaded


@pytest.fixture(params=[V3, V31], ids=["V3", "V3.1"])
def server(session: Session, request: pytest.FixtureRequest) -> Iterator[Server]:
    with serving(session.engine, served_by(session, request.param)) as running:
        yield running


def test_a_schema_holds_for_each_of_several_answers_and_in_a_stream(server: Server) -> None:
    asked: dict[str, Any] = {"type": "json_schema", "json_schema": {"schema": CITY}}
    answer = server.answer(n=4, response_format=asked, seed=5, logprobs=True, **HOT)
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    for choice, text in zip(answer["choices"], texts, strict=True):
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(text), CITY)
        raw = bytes(b for e in choice["logprobs"]["content"] for b in e["bytes"])
        assert raw.decode() == text
        assert all(e["logprob"] < 0 for e in choice["logprobs"]["content"])
    assert len(set(texts)) == 4
    assert answer["timings"]["drafted"] > 0
    events = server.events(response_format=asked, **HOT)
    streamed = [e["choices"][0]["delta"].get("content") or "" for e in events[:-1]]
    jsonschema.validate(json.loads("".join(streamed)), CITY)


@pytest.mark.parametrize("named", [False, True])
def test_demanded_calls_are_calls_with_the_arguments_that_were_declared(
    server: Server, named: bool
) -> None:
    choice = {"type": "function", "function": {"name": "put"}} if named else "required"
    answer = server.answer(n=3, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, **HOT)
    for one in answer["choices"]:
        assert one["finish_reason"] == "tool_calls"
        assert not one["message"]["content"]
        [call] = one["message"]["tool_calls"]
        assert call["function"]["name"] in (["put"] if named else ["get", "put"])
        jsonschema.validate(json.loads(call["function"]["arguments"]), CITY)


def test_a_session_binds_its_answers_and_tells_how_likely_each_token_was(
    session: Session,
) -> None:
    options = AnswerOptions(json_schema=CITY, n_logprobs=2)
    params = SamplingParams(temperature=1.5, seed=3)
    ask = [{"role": "user", "content": "Where?"}]
    for pieces in (
        session.chat(ask, params, 300, options=options),
        session.complete("Where?", params, 300, options=options),
    ):
        said = list(pieces)
        jsonschema.validate(json.loads("".join(piece.text for piece in said)), CITY)
        tokens = [token for piece in said for token in piece.tokens]
        likely = [entry for piece in said for entry in piece.logprobs]
        assert [entry.token for entry in likely] == tokens
        assert all(len(entry.top) == 2 for entry in likely)


def test_a_form_begins_behind_real_reasoning_tokens(session: Session) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "response_format": {}}
    body["response_format"] = {"type": "json_object"}
    plan = plan_chat(served_by(session, R1), ChatRequest.model_validate(body))
    end = min(session.engine.limits.end_tokens)
    for text, is_complete in [
        ('hm, {"a": </think>\n\n{"a": [1]}', True),
        ('hm</think>\n\n{"a": [1]', False),
        ("hm</think> well", False),
    ]:
        constraint = plan.constrain()
        constraint.commit(session.vocab.tokenize(text, add_special=False))
        mask = constraint.allowed(())
        assert (constraint.failure is None and bool(mask[end])) is is_complete, text
