"""What the server refuses: always in OpenAI's shape, in one sentence, and before any work."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator

import pytest

from gguf_mtp.errors import DecodeError, LoadFailed
from tests.support.chat_formats import BOS, CHATML
from tests.support.scripted import Answer, ScriptedEngine
from tests.support.serving import Server, error_of, served_of, serving
from tests.support.waiting import wait_for

pytestmark = pytest.mark.server


@pytest.fixture
def server() -> Iterator[Server]:
    engine = ScriptedEngine(lambda *_: Answer("fine"), n_ctx=100)
    with serving(engine, served_of(engine, CHATML)) as running:
        yield running
    assert engine.requests == []  # nothing of what is refused here reaches the engine


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": "Hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 5.5}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"stream": "yes"}, "stream"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"stop": 5}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 1001}, "stop"),
        ({"seed": 1.5}, "seed"),
        ({"draft": "always"}, "draft"),
        ({"draft": "mtp,off"}, "draft"),
        ({"draft": ["mtp"]}, "draft"),
        ({"draft_max": -1}, "draft_max"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ],
)
def test_wrong_types_and_ranges_name_the_field(server: Server, body: dict, param: str) -> None:
    error = error_of(server.chat(**body), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"].startswith(param)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0}, "top_p is 0"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"top_k": -5}, "top_k is -5"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"stop": ""}, "a stop string is empty"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0] has no content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0] has a content part of type 'image_url'",
        ),
        ({"typical_p": 0}, "typical_p is 0"),
        ({"repeat_penalty": 0}, "repeat_penalty is 0"),
        ({"repetition_penalty": -1.0}, "repeat_penalty is -1.0"),
        ({"presence_penalty": float("inf")}, "presence_penalty is inf"),
        ({"repeat_last_n": -2}, "repeat_last_n is -2"),
        ({"samplers": ["dice"]}, "unknown sampler 'dice'"),
        ({"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias has 2000 entries"),
        ({"logit_bias": {"9999": 1}}, "logit_bias names token 9999"),
        ({"logit_bias": {"-5": 1}}, "token -5"),
        ({"logit_bias": [[1.5, 1]]}, "logit_bias has 1.5 where a token is expected"),
        ({"logit_bias": [[5, "x"]]}, "logit_bias gives token 5 the bias 'x'"),
        ({"logit_bias": {"5": 1e999}}, "a bias that is not finite"),
        ({"stop_token_ids": [271]}, "token 271 cannot stop an answer"),
        ({"top_logprobs": 3}, "top_logprobs is given, but logprobs is not true"),
        ({"response_format": {"type": "json_schema"}}, "json_schema.schema is missing"),
        (
            {"json_schema": {"properties": {"a": {"type": "number", "minimum": "x"}}}},
            "json_schema: at /properties/a: Expected f64 for 'minimum'",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            'response_format.json_schema.schema: at the root: Unimplemented keys: ["not"]',
        ),
        ({"grammar": "root ::= x"}, "grammar: line 1, column 10: there is no rule called x"),
        ({"grammar": "%llguidance {}\nstart: x"}, "grammar: line 2, column 8: unknown name"),
        ({"guided_regex": "(a"}, "guided_regex: line 1, column 8: invalid regex"),
        ({"guided_json": "{"}, "guided_json is a string that is not valid JSON"),
        ({"guided_json": 5}, "guided_json"),
        (
            {"grammar": 'root ::= "x"', "json_schema": {"type": "null"}},
            "json_schema and grammar cannot be combined",
        ),
        ({"guided_choice": ["a"], "min_tokens": 3}, "min_tokens cannot be used with a grammar"),
        ({"guided_choice": ["a"], "ignore_eos": True}, "ignore_eos cannot be used with a grammar"),
        # what is not built must not be disregarded
        ({"mirostat": 2}, "mirostat is not supported"),
        ({"xtc_probability": 0.5}, "xtc_probability is not supported"),
        ({"functions": [{"name": "f"}]}, "functions is not supported"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(server: Server, body: dict, words: str) -> None:
    content = json.dumps({"messages": [{"role": "user", "content": "Hi"}]} | body)
    response = server.client.post(
        "/v1/chat/completions", content=content, headers={"Content-Type": "application/json"}
    )
    assert words in error_of(response, 400)["message"]


def test_the_same_for_completions(server: Server) -> None:
    def message(**body) -> str:
        return error_of(server.client.post("/v1/completions", json=body), 400)["message"]

    assert message(prompt="x", logprobs=21).startswith("logprobs")
    assert message(prompt="x", logprobs=True).startswith("logprobs")
    assert "echo is not supported" in message(prompt="x", echo=True)
    assert "no token 99999" in message(prompt=[1, 99999])
    assert "no token -1" in message(prompt=[-1])
    assert message(prompt=[]).startswith("prompt")
    assert message(prompt={"a": 1}).startswith("prompt")
    assert "prompt is empty" in message(prompt=[[]])


def test_neutral_values_of_what_is_not_built_are_taken() -> None:
    engine = ScriptedEngine(lambda *_: Answer("fine"))
    with serving(engine, served_of(engine, CHATML)) as server:
        server.answer(
            presence_penalty=0,
            frequency_penalty=0.0,
            repeat_penalty=1.0,
            logit_bias={},
            logprobs=False,
            top_logprobs=0,
            response_format={"type": "text"},
            json_schema={},
            grammar="",
            mirostat=0,
            best_of=1,
            unknown={"nobody": "knows"},
        )


def test_an_over_long_prompt_names_both_counts(server: Server) -> None:
    error = error_of(server.chat(messages=[{"role": "user", "content": "x" * 100}]), 400)
    assert "maximum context length is 100 tokens" in error["message"]
    assert "the prompt has 151;" in error["message"]
    assert error["code"] == "context_length_exceeded"
    stream = server.chat(messages=[{"role": "user", "content": "x" * 100}], stream=True)
    assert error_of(stream, 400) == error  # a status, not an event


def test_bodies_that_are_no_json(server: Server) -> None:
    post = server.client.post
    url, json_type = "/v1/chat/completions", {"Content-Type": "application/json"}
    broken = error_of(post(url, content=b'{"messages": [', headers=json_type), 400)
    assert broken["message"].startswith("the body is not JSON")
    for body in (b"[1]", b'"x"', b""):
        error = error_of(post(url, content=body, headers=json_type), 400)
        assert "JSON object" in error["message"]
    deep = post(url, content=b"[" * 100_000, headers=json_type)
    error_of(deep, 400)


def test_other_endpoints(server: Server) -> None:
    for path in ("embeddings", "audio/speech"):
        error = error_of(server.client.post(f"/v1/{path}", json={}), 404)
        assert error["message"] == f"this server has no /v1/{path}"
    assert "no GET /v1/nothing" in error_of(server.client.get("/v1/nothing"), 404)["message"]
    wrong = error_of(server.client.get("/v1/chat/completions"), 405)
    assert "no GET /v1/chat/completions" in wrong["message"]
    for path in ("/docs", "/openapi.json", "/web/x"):
        error_of(server.client.get(path), 404)


def test_a_template_that_raises_is_a_400_with_its_message() -> None:
    template = "{{ raise_exception('roles must alternate') if messages | length > 1 }}x"
    engine = ScriptedEngine(lambda *_: Answer("fine"))
    with serving(engine, served_of(engine, template)) as server:
        two = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
        error = error_of(server.chat(messages=two), 400)
        said = "the model's chat template refused the messages: roles must alternate"
        assert error["message"] == said
        assert server.chat().status_code == 200


@pytest.mark.parametrize(
    "escape",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ self._TemplateReference__context.environment }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% include 'x' %}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(escape: str) -> None:
    engine = ScriptedEngine(lambda *_: Answer("fine"))
    with serving(engine, served_of(engine, escape)) as server:
        error = error_of(server.chat(), 400)
    assert error["message"].startswith("the model's chat template")
    assert engine.requests == []


@pytest.mark.parametrize(
    "look",
    ["'{0.__class__}'.format(1)", "''['__class__']", "''|attr('__class__')", "joiner.__dict__"],
)
def test_a_template_cannot_look_inside_what_it_is_given(look: str) -> None:
    prompts: list[str] = []

    def script(prompt: str, _: int) -> Answer:
        prompts.append(prompt)
        return Answer("fine")

    engine = ScriptedEngine(script)
    with serving(engine, served_of(engine, f"<{{{{ {look} }}}}>")) as server:
        server.answer()
    assert prompts == [f"{BOS}<>"]


# -- failures inside -----------------------------------------------------------------------------


def failing(error: Exception) -> ScriptedEngine:
    return ScriptedEngine(lambda *_: Answer("fine"), failures={2: error, 3: error})


def test_a_failed_decode_is_a_500_that_tells_no_secret(caplog) -> None:
    engine = failing(DecodeError(-3, "decoding /home/me/model.gguf failed"))
    with serving(engine, served_of(engine, CHATML)) as server:
        error = error_of(server.chat(), 500)
        assert "model.gguf" not in error["message"]
        assert error["type"] == "server_error"
        assert server.answer()["choices"][0]["message"]["content"] == "fine"
    assert "model.gguf" in caplog.text


def test_a_failure_in_a_stream_is_an_event_and_the_end() -> None:
    engine = failing(DecodeError(-3, "decoding failed"))
    with serving(engine, served_of(engine, CHATML)) as server:
        *_, error, done = server.events()
    assert error["error"]["type"] == "server_error"
    assert done == "[DONE]"


def test_an_unforeseen_failure_is_a_500_too(monkeypatch, caplog) -> None:
    engine = ScriptedEngine(lambda *_: Answer("fine"))
    with serving(engine, served_of(engine, CHATML)) as server:
        secret = LoadFailed("/home/me/model.gguf is damaged")
        monkeypatch.setattr("gguf_mtp.server.plan.prepare_chat", raiser(secret))
        assert "damaged" not in error_of(server.chat(), 500)["message"]
    assert "damaged" in caplog.text


def raiser(error: Exception):
    def raises(*_: object) -> None:
        raise error

    return raises


def test_a_busy_server_says_when_to_come_again() -> None:
    engine = ScriptedEngine(lambda *_: Answer("fine"), n_seq=1)
    engine.steps = threading.Semaphore(0)
    with serving(engine, served_of(engine, CHATML), n_queue=0) as server:
        first = threading.Thread(target=server.chat)
        first.start()
        wait_for(lambda: engine.requests)
        response = server.chat()
        error = error_of(response, 503)
        assert "busy: 1 of at most 1 answers are running or waiting" in error["message"]
        assert int(response.headers["retry-after"]) > 0
        engine.steps.release(100)
        first.join()


def test_health_when_the_engine_is_dead(caplog) -> None:
    caplog.set_level(logging.CRITICAL)
    engine = ScriptedEngine(lambda *_: Answer("fine"), failures={1: SystemExit()})
    with serving(engine, served_of(engine, CHATML)) as server:
        assert server.client.get("/health").status_code == 200
        assert "engine has failed" in error_of(server.chat(), 503)["message"]
        wait_for(lambda: not server.worker.is_alive)
        assert "engine has stopped" in error_of(server.client.get("/health"), 503)["message"]


def test_a_base_url_without_its_version_is_told_of() -> None:
    engine = ScriptedEngine(lambda *_: Answer("fine"))
    with serving(engine, served_of(engine)) as server:
        response = server.client.post("/completions", json={"prompt": "x"})
        assert response.status_code == 404
        assert "; did you mean /v1/completions?" in response.json()["error"]["message"]
