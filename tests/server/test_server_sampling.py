"""How a request wants its tokens drawn reaches the engine; how likely they were reaches clients."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from openai import OpenAI

from gguf_mtp.params import SAMPLERS, SamplingParams
from tests.support.chat_formats import CHATML, R1, V31
from tests.support.scripted import Answer, Running, ScriptedEngine
from tests.support.serving import Server, error_of, served_of, serving

pytestmark = pytest.mark.server

CALLS = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "é"}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>"
)


@contextmanager
def answering(text: str, template: str = CHATML, chunk: int = 3) -> Iterator[tuple[Server, Any]]:
    engine = ScriptedEngine(lambda *_: Answer(text, chunk=chunk))
    with serving(engine, served_of(engine, template)) as server:
        yield server, engine


def asked(**body: Any) -> Running:
    """What the engine is asked for."""
    with answering("fine") as (server, engine):
        server.answer(**body)
        return engine.requests[0]


# -- what the engine is asked ------------------------------------------------------------------


def test_every_field_arrives() -> None:
    request = asked(
        temperature=0.5,
        top_k=7,
        top_p=0.75,
        min_p=0.25,
        typical_p=0.5,
        presence_penalty=1,
        frequency_penalty=-0.5,
        repeat_penalty=1.25,
        repeat_last_n=-1,
        seed=11,
        samplers=["top-k", "temp"],
        stop_token_ids=[65],
        draft_max=2,
    )
    assert request.params == SamplingParams(
        temperature=0.5,
        top_k=7,
        top_p=0.75,
        min_p=0.25,
        seed=11,
        typical_p=0.5,
        presence_penalty=1,
        frequency_penalty=-0.5,
        repeat_penalty=1.25,
        repeat_last_n=-1,
        samplers=("top_k", "temperature"),
    )
    assert (request.options.stop_tokens, request.options.draft_max) == ({65}, 2)
    assert request.options.n_logprobs is None


def test_null_and_nothing_mean_the_server_s_own_settings() -> None:
    fields = ("presence_penalty", "repeat_penalty", "typical_p", "samplers", "logit_bias", "stop")
    assert asked(**dict.fromkeys(fields)).params == SamplingParams()
    assert SamplingParams().samplers == SAMPLERS


@pytest.mark.parametrize(
    ("bias", "expected"),
    [
        ({"65": 2, "66": -100.0}, {65: 2.0, 66: -100.0}),
        ([[65, 1.5], [66, False]], {65: 1.5, 66: -math.inf}),
        ([["AB", -1]], {65: -1.0, 66: -1.0}),
        ({"A": 3}, {65: 3.0}),
        ([[65, 1], [65, 2]], {65: 3.0}),
        ({"270": False}, {270: -math.inf}),
        ({}, {}),
    ],
)
def test_biases_by_id_by_text_and_as_bans(bias: Any, expected: dict[int, float]) -> None:
    assert dict(asked(logit_bias=bias).params.logit_bias) == expected


def test_an_ignored_end_is_banned() -> None:
    assert dict(asked(ignore_eos=True, logit_bias={"65": 1}).params.logit_bias) == {
        65: 1.0,
        257: -math.inf,
    }
    assert asked(ignore_eos=False).params.logit_bias == ()


def test_the_other_name_of_the_repeat_penalty() -> None:
    assert asked(repetition_penalty=1.5).params.repeat_penalty == 1.5
    assert asked(repetition_penalty=1.5, repeat_penalty=1.2).params.repeat_penalty == 1.2


def test_each_of_several_answers_has_its_constraint() -> None:
    with answering("a") as (server, engine):
        server.answer(n=2, guided_choice=["a"])
    first, second = (r.options.constraint for r in engine.requests)
    assert first is not second
    assert list(first.allowed(()).nonzero()[0]) == [97]


# -- how likely tokens were --------------------------------------------------------------------


def test_a_chat_s_log_probabilities() -> None:
    with answering("hé") as (server, _):
        [choice] = server.answer(logprobs=True, top_logprobs=3)["choices"]
    entries = choice["logprobs"]["content"]
    assert choice["logprobs"]["refusal"] is None
    assert [(e["token"], e["logprob"], e["bytes"]) for e in entries] == [
        ("h", -13.0, [104]),
        ("�", -24.375, [195]),
        ("�", -21.125, [169]),
    ]
    assert entries[0]["top_logprobs"] == [
        {"token": "\x01", "logprob": -0.125, "bytes": [1]},
        {"token": "�", "logprob": -24.375, "bytes": [195]},
        {"token": "\0", "logprob": -9999.0, "bytes": [0]},
    ]
    assert entries[0].keys() == {"token", "logprob", "bytes", "top_logprobs"}


def test_without_alternatives_and_without_any() -> None:
    with answering("ab") as (server, _):
        [choice] = server.answer(logprobs=True)["choices"]
        assert [e["top_logprobs"] for e in choice["logprobs"]["content"]] == [[], []]
        for body in ({}, {"logprobs": False}, {"logprobs": False, "top_logprobs": 0}):
            assert server.answer(**body)["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
def test_a_stream_has_the_same_entries_with_the_text_they_belong_to(chunk: int) -> None:
    with answering("hé, 日本 x", chunk=chunk) as (server, _):
        [whole] = server.answer(logprobs=True, top_logprobs=1)["choices"]
        events = server.events(logprobs=True, top_logprobs=1)
    content, entries = "", []
    for event in events[:-1]:
        [choice] = event["choices"]
        content += choice["delta"].get("content") or ""
        if choice.get("logprobs"):
            entries += choice["logprobs"]["content"]
        raw = bytes(byte for e in entries for byte in e["bytes"])
        assert raw.decode("utf-8", errors="ignore").startswith(content)
    assert entries == whole["logprobs"]["content"]
    assert bytes(b for e in entries for b in e["bytes"]).decode() == "hé, 日本 x"


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_completion_s_log_probabilities(is_stream: bool) -> None:
    with answering("hé!") as (server, _):
        body = {"prompt": "x", "logprobs": 2}
        if is_stream:
            events = server.events("/v1/completions", **body)
            parts = [e["choices"][0]["logprobs"] for e in events[:-1]]
            found = {key: [v for p in parts if p for v in p[key]] for key in parts[0]}
        else:
            found = server.client.post("/v1/completions", json=body).json()["choices"][0][
                "logprobs"
            ]
    assert found["tokens"] == ["h", "bytes:\\xc3", "bytes:\\xa9", "!"]
    assert found["token_logprobs"] == [-13.0, -24.375, -21.125, -4.125]
    assert found["text_offset"] == [0, 1, 1, 2]
    assert found["top_logprobs"][0] == {"\x01": -0.125, "bytes:\\xc3": -24.375, "h": -13.0}
    assert found["top_logprobs"][1] == {"\x01": -0.125, "bytes:\\xc3": -24.375}


def test_no_alternatives_in_a_completion_leave_the_token_itself() -> None:
    with answering("h") as (server, _):
        url, body = "/v1/completions", {"prompt": "x", "logprobs": 0}
        [choice] = server.client.post(url, json=body).json()["choices"]
        [other] = server.client.post(url, json={"prompt": "x"}).json()["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"h": -13.0}]
    assert other["logprobs"] is None


def test_a_stop_string_cuts_them_with_the_text() -> None:
    with answering("abSTOPcd", chunk=100) as (server, _):
        [choice] = server.answer(logprobs=True, stop="STOP", return_token_ids=True)["choices"]
    assert choice["message"]["content"] == "ab"
    assert [e["token"] for e in choice["logprobs"]["content"]] == ["a", "b"]
    assert choice["token_ids"] == [97, 98]


def test_reasoning_and_calls_have_entries_too() -> None:
    with answering("Hm</think>ok", R1) as (server, _):
        [choice] = server.answer(logprobs=True)["choices"]
    assert choice["message"]["reasoning_content"] == "Hm"
    tokens = [e["token"] for e in choice["logprobs"]["content"]]
    assert tokens == ["H", "m", "</think>", "o", "k"]
    tool = {"type": "function", "function": {"name": "f"}}
    with answering(CALLS, V31) as (server, _):
        [choice] = server.answer(logprobs=True, tools=[tool])["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["logprobs"]["content"][0]["token"] == "<｜tool▁calls▁begin｜>"


def test_openai_s_client_reads_them() -> None:
    with answering("hé", chunk=1) as (server, _):
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        ask = [{"role": "user", "content": "Hi"}]
        whole = client.chat.completions.create(
            model="m", messages=ask, logprobs=True, top_logprobs=2
        )
        [choice] = whole.choices
        assert choice.logprobs is not None
        assert [e.bytes for e in choice.logprobs.content or []] == [[104], [195], [169]]
        parts = client.chat.completions.create(
            model="m", messages=ask, logprobs=True, top_logprobs=2, stream=True
        )
        found = [
            e.token
            for part in parts
            for e in (part.choices[0].logprobs.content if part.choices[0].logprobs else [])
        ]
        assert found == ["h", "�", "�"]
        old = client.completions.create(model="m", prompt="x", logprobs=1)
        assert old.choices[0].logprobs is not None
        assert old.choices[0].logprobs.text_offset == [0, 1, 1]
        with pytest.raises(openai.BadRequestError, match="top_logprobs"):
            client.chat.completions.create(model="m", messages=ask, top_logprobs=2)


# -- a grammar that could not be followed ------------------------------------------------------


class Straying(ScriptedEngine):
    """Commits what its script says to the constraint, whatever that allows."""

    def step(self) -> list[Any]:
        running = {r.id: r for r in self.requests}
        chunks = super().step()
        for chunk in chunks:
            constraint = running[chunk.seq].options.constraint
            if constraint:
                constraint.commit(chunk.tokens)
        return chunks


def test_an_answer_that_left_its_grammar_is_an_error_and_no_answer() -> None:
    engine = Straying(lambda *_: Answer("no"))
    with serving(engine, served_of(engine, CHATML)) as server:
        error = error_of(server.chat(guided_choice=["yes"]), 400)
        said = "the answer's grammar could not be followed: it does not allow token 110"
        assert said in error["message"]
        events = server.events(guided_choice=["yes"])
        assert events[-2]["error"]["message"] == error["message"]
        assert events[-1] == "[DONE]"
        assert server.answer(guided_choice=["no"])["choices"][0]["message"]["content"] == "no"
        assert server.answer(guided_choice=["n"], stop="o")["choices"][0]["finish_reason"] == "stop"
