"""The endpoints over a scripted engine: what clients get, to the token."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gguf_mtp.params import SamplingParams
from gguf_mtp.server.app import ServerOptions
from tests.support.chat_formats import BOS, CHATML, V3
from tests.support.scripted import Answer, ScriptedEngine
from tests.support.serving import Server, served_of, serving

pytestmark = pytest.mark.server


@contextmanager
def over(
    *answers: str | Answer, template: str | None = CHATML, **options
) -> Iterator[tuple[Server, ScriptedEngine]]:
    """A server that answers its requests with `answers`, in turn."""
    scripts = [a if isinstance(a, Answer) else Answer(a) for a in answers]
    engine = ScriptedEngine(lambda _, n: scripts[n % len(scripts)], **options)
    with serving(engine, served_of(engine, template)) as server:
        yield server, engine


def contents(events: list, key: str = "content") -> str:
    return "".join(
        choice["delta"].get(key) or ""
        for event in events
        if isinstance(event, dict)
        for choice in event["choices"]
    )


def test_a_chat_answer_in_full() -> None:
    with over("Hello, Wörld.") as (server, engine):
        answer = server.answer(model="anything", temperature=0)
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", "scripted")
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello, Wörld."}
    assert (choice["index"], choice["finish_reason"]) == (0, "stop")
    n_prompt = len(engine.requests[0].prompt)
    assert answer["usage"] == {
        "prompt_tokens": n_prompt,
        "completion_tokens": 14,
        "total_tokens": n_prompt + 14,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    timings = answer["timings"]
    assert timings["prefill_tokens"] == n_prompt - 1
    assert (timings["decode_tokens"], timings["decode_s"], timings["rounds"]) == (14, 1.25, 5)
    assert (timings["drafted"], timings["accepted"], timings["acceptance_rate"]) == (9, 9, 1.0)
    assert timings["accepted_per_position"] == [5, 4]
    assert (timings["depth"], timings["tokens_per_s"]) == (1.8, 11.2)


def test_a_chat_stream_says_the_same() -> None:
    with over("Hello, Wörld.") as (server, _):
        events = server.events()
    assert events[-1] == "[DONE]"
    *chunks, last, _ = events
    assert {(c["object"], c["model"], c["id"]) for c in [*chunks, last]} == {
        ("chat.completion.chunk", "scripted", last["id"])
    }
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert contents(events) == "Hello, Wörld."
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * len(chunks)
    assert last["choices"] == [{"index": 0, "delta": {}, "finish_reason": "stop"}]
    assert last["timings"]["decode_tokens"] == 14
    assert not any("usage" in chunk for chunk in chunks)


def test_usage_comes_in_one_last_chunk_only_when_asked_for() -> None:
    with over("Hello.") as (server, _):
        whole = server.answer()
        asked = server.events(stream_options={"include_usage": True})
        not_asked = server.events(stream_options={"include_usage": False})
        null = server.events(stream_options=None)
    *chunks, usage, done = asked
    assert done == "[DONE]"
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"])
    assert [c["usage"] for c in chunks] == [None] * len(chunks)
    assert not any("usage" in c for c in [*not_asked[:-1], *null[:-1]])


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 40])
def test_characters_are_never_split(chunk: int) -> None:
    text = "日本語 🐻‍❄️ né"
    with over(Answer(text, chunk=chunk)) as (server, _):
        events = server.events()
    assert contents(events) == text
    assert "\ufffd" not in contents(events)


def test_bytes_that_are_no_text_become_replacement_characters() -> None:
    with over(Answer(b"ok \xff\xe6\x97", chunk=1)) as (server, _):
        assert contents(server.events()) == "ok \ufffd\ufffd"


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 7, 50])
def test_stop_strings_cut_text_ids_and_usage_together(chunk: int) -> None:
    text = "One, two. STO STOP three"
    with over(Answer(text, chunk=chunk)) as (server, engine):
        options = {"stop": ["STOP", "never"], "return_token_ids": True}
        answer = server.answer(**options)
        events = server.events(**options, stream_options={"include_usage": True})
    expected = "One, two. STO "
    [choice] = answer["choices"]
    assert choice["message"]["content"] == expected
    assert choice["token_ids"] == list(expected.encode())
    assert choice["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len(expected)
    assert contents(events) == expected
    *chunks, usage, _ = events
    ids = [id_ for c in chunks for id_ in c["choices"][0].get("token_ids", [])]
    assert ids == list(expected.encode())
    assert usage["usage"] == answer["usage"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    if chunk < 5:  # the engine is stopped within the round, not when somebody has read the text
        assert engine.cancelled == [1, 2]


def test_a_stop_string_that_never_completes_is_text() -> None:
    with over("It is STO") as (server, _):
        assert contents(server.events(stop="STOP")) == "It is STO"
        whole = server.answer(stop="STOP")
    assert whole["usage"]["completion_tokens"] == 9


def test_max_tokens_cuts_and_says_so() -> None:
    with over("Hello there") as (server, engine):
        for field in ("max_tokens", "max_completion_tokens"):
            answer = server.answer(**{field: 4})
            assert answer["choices"][0]["message"]["content"] == "Hell"
            assert answer["choices"][0]["finish_reason"] == "length"
        both = server.answer(max_tokens=9, max_completion_tokens=5)
        assert both["usage"]["completion_tokens"] == 5
        assert server.answer(max_tokens=-1)["choices"][0]["finish_reason"] == "stop"
    assert engine.requests[-1].max_tokens > 500


def test_sampling_fields_reach_the_engine_and_nulls_mean_defaults() -> None:
    with over("x") as (server, engine):
        server.answer(temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=3, draft_max=2)
        names = "temperature top_p top_k min_p seed n stop stream stream_options max_tokens"
        more = "max_completion_tokens tools tool_choice parallel_tool_calls chat_template_kwargs"
        refused = "presence_penalty frequency_penalty logit_bias logprobs top_logprobs model"
        ours = "draft draft_max return_token_ids response_format user metadata"
        server.answer(**dict.fromkeys(f"{names} {more} {refused} {ours}".split()))
        server.answer(draft=False)
        server.answer(draft="off", draft_max=3)
        server.answer(draft="ngram,mtp")
        server.answer(draft="auto")
        server.answer(draft=True, draft_max=0, temperature=1)
    wanted = SamplingParams(temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=3)
    assert engine.requests[0].params == wanted
    assert engine.requests[1].params == SamplingParams()
    assert [r.options.draft_max for r in engine.requests] == [2, None, None, 3, None, None, 0]
    drafters = [r.options.draft for r in engine.requests]
    assert drafters == [None, None, (), (), ("ngram", "mtp"), None, None]


def test_several_choices() -> None:
    with over("first", "second", n_seq=4) as (server, engine):
        answer = server.answer(n=2, seed=5, temperature=1)
        events = server.events(n=2, stream_options={"include_usage": True})
    texts = [c["message"]["content"] for c in answer["choices"]]
    assert texts == ["first", "second"]
    assert [c["index"] for c in answer["choices"]] == [0, 1]
    assert [r.params.seed for r in engine.requests[:2]] == [5, 6]
    n_prompt = len(engine.requests[0].prompt)
    assert answer["usage"]["prompt_tokens"] == n_prompt  # once, for both
    assert answer["usage"]["completion_tokens"] == len("firstsecond")
    for index, text in enumerate(texts):
        mine = [e for e in events[:-2] if e["choices"][0]["index"] == index]
        assert contents(mine) == text
        assert mine[0]["choices"][0]["delta"]["role"] == "assistant"
        assert mine[-1]["choices"][0]["finish_reason"] == "stop"
    assert events[-2]["usage"] == answer["usage"]


def test_completions() -> None:
    with over("one", "two", "three", "four", n_seq=4) as (server, engine):

        def post(**body):
            return server.client.post("/v1/completions", json=body)

        answer = post(prompt="Once").json()
        assert (answer["object"], answer["id"][:5]) == ("text_completion", "cmpl-")
        [choice] = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("one", "stop")
        several = post(prompt=["a", "bb"], n=2, max_tokens=None).json()
        assert [c["index"] for c in several["choices"]] == [0, 1, 2, 3]
        assert several["usage"]["prompt_tokens"] == len("abb") + 2
        post(prompt=[72, 105])
        post(prompt=[[72], [105]])
        events = server.events("/v1/completions", prompt="x", max_tokens=2)
    assert [c["choices"][0]["text"] for c in events[:-1]] == ["on", ""]
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    assert engine.requests[0].max_tokens == 16
    prompts = [list(r.prompt) for r in engine.requests]
    assert prompts[0] == [256, *b"Once"]
    assert sorted(prompts[1:5]) == [[256, 97]] * 2 + [[256, 98, 98]] * 2
    assert prompts[5:8] == [[72, 105], [72], [105]]


def test_exactly_one_bos() -> None:
    with over("x", template=V3) as (server, engine):
        server.answer()  # V3's template writes it itself
        server.client.post("/v1/completions", json={"prompt": f"{BOS}Once"})
        server.client.post("/v1/completions", json={"prompt": "Once"})
        server.client.post("/v1/completions", json={})
    with over("x", template=CHATML) as (chatml_server, chatml_engine):
        chatml_server.answer()  # ChatML's does not
    requests = engine.requests + chatml_engine.requests
    assert [list(r.prompt).count(256) for r in requests] == [1] * 5
    assert {r.prompt[0] for r in requests} == {256}


def test_models_health_and_tokens() -> None:
    with over("x") as (server, _):
        get = server.client.get
        assert get("/health").json() == {"status": "ok", "unfinished": 0}
        [model] = get("/v1/models").json()["data"]
        assert (model["id"], model["object"]) == ("scripted", "model")
        assert model["created"] == 1_700_000_000
        assert get("/v1/models/scripted").json() == model
        assert get("/v1/models/other").status_code == 404
        post = server.client.post
        assert post("/tokenize", json={"content": "né"}).json() == {"tokens": [110, 195, 169]}
        with_bos = post("/tokenize", json={"content": f"a{BOS}", "add_special": True}).json()
        assert with_bos == {"tokens": [256, 97, 256]}
        plain = post("/tokenize", json={"content": BOS, "parse_special": False}).json()
        assert plain == {"tokens": list(BOS.encode())}
        text = post("/detokenize", json={"tokens": [110, 195, 169, 195]}).json()
        assert text == {"content": "né\ufffd"}
        wrong = post("/detokenize", json={"tokens": [5000]})
        assert (wrong.status_code, "no token 5000" in wrong.text) == (400, True)


def test_comments_keep_a_silent_stream_alive() -> None:
    for comment_s, expected in ((0.05, True), (0, False)):
        engine = ScriptedEngine(lambda *_: Answer("late"))
        engine.steps = threading.Semaphore(0)
        options = ServerOptions(comment_s=comment_s)
        with serving(engine, served_of(engine, CHATML), options) as server:
            body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
            with server.client.stream("POST", "/v1/chat/completions", json=body) as response:
                assert response.status_code == 200
                lines = response.iter_lines()
                if expected:
                    assert next(lines).startswith(": ")
                engine.steps.release(100)
                rest = list(lines)
        assert any(line.startswith(":") for line in rest) <= expected
        assert rest[-2:] == ["data: [DONE]", ""]
