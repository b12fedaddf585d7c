"""Every field that clients of OpenAI, llama-server and vLLM send is honoured, refused or harmless.

The lists are those of openai-python 2, of llama.cpp's tools/server/server-schema.cpp, and of vLLM's
protocol for chats and completions.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from gguf_mtp.server.field_tables import (
    HARMLESS,
    NOT_BUILT,
    NOT_BUILT_IN_CHATS,
    NOT_BUILT_IN_COMPLETIONS,
)
from gguf_mtp.server.schemas import ChatRequest, CompletionRequest
from tests.support.chat_formats import CHATML, V31
from tests.support.scripted import Answer, ScriptedEngine
from tests.support.serving import error_of, served_of, serving

pytestmark = pytest.mark.server

OPENAI = """messages model audio frequency_penalty function_call functions logit_bias logprobs
    max_completion_tokens max_tokens metadata modalities moderation n parallel_tool_calls prediction
    presence_penalty prompt_cache_key prompt_cache_options prompt_cache_retention reasoning_effort
    response_format safety_identifier seed service_tier stop store stream stream_options temperature
    tool_choice tools top_logprobs top_p user verbosity web_search_options prompt best_of echo
    suffix"""
LLAMA_SERVER = """adaptive_decay adaptive_target backend_sampling cache_prompt dry_allowed_length
    dry_base dry_multiplier dry_penalty_last_n dry_sequence_breakers dynatemp_exponent
    dynatemp_range echo frequency_penalty grammar grammar_lazy ignore_eos json_schema logit_bias
    lora max_tokens min_keep min_p mirostat mirostat_eta mirostat_tau n n_cache_reuse n_discard
    n_indent n_keep n_predict n_probs parse_tool_calls post_sampling_probs presence_penalty
    reasoning_control reasoning_format repeat_last_n repeat_penalty response_fields return_progress
    return_tokens samplers seed speculative.n_max speculative.n_min speculative.ngram_min_hits
    speculative.ngram_size_m speculative.ngram_size_n speculative.p_min speculative.type
    sse_ping_interval stop stream stream_options t_max_predict_ms t_max_prompt_ms temperature
    timings_per_token top_k top_n_sigma top_p typical_p verbose xtc_probability xtc_threshold
    id_slot chat_template_kwargs continue_final_message add_generation_prompt reasoning_effort
    reasoning_budget_tokens thinking_budget_tokens"""
VLLM = """add_generation_prompt add_special_tokens allowed_token_ids bad_words best_of chat_template
    chat_template_kwargs continue_final_message detokenize documents echo guided_choice
    guided_grammar guided_json guided_regex ignore_eos include_stop_str_in_output
    kv_transfer_params length_penalty min_p min_tokens priority prompt_embeds prompt_logprobs
    repetition_penalty request_id return_token_ids skip_special_tokens
    spaces_between_special_tokens stop_token_ids structured_outputs top_k truncate_prompt_tokens
    use_beam_search enable_thinking thinking"""


def test_no_field_is_nobodys() -> None:
    honoured = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
    known = honoured | NOT_BUILT.keys() | NOT_BUILT_IN_CHATS.keys() | HARMLESS.keys()
    for names in (OPENAI, LLAMA_SERVER, VLLM):
        assert {*names.split()} - known == set()
    assert NOT_BUILT_IN_CHATS.keys() == NOT_BUILT_IN_COMPLETIONS.keys()


@pytest.mark.parametrize("name", [*NOT_BUILT, *NOT_BUILT_IN_CHATS])
def test_what_is_not_built_is_named(name: str) -> None:
    """Any value but those that ask for nothing, which pass."""
    engine = ScriptedEngine(lambda *_: Answer("fine"))
    with serving(engine, served_of(engine, CHATML)) as server:
        odd = error_of(server.chat(**{name: "something else"}), 400)
        assert odd["message"] == f"{name} is not supported yet; omit it"
        for neutral in (NOT_BUILT | NOT_BUILT_IN_CHATS)[name]:
            assert server.chat(**{name: neutral}).status_code == 200
    assert len(engine.requests) == len((NOT_BUILT | NOT_BUILT_IN_CHATS)[name])


def test_harmless_fields_change_nothing() -> None:
    prompts: list[str] = []

    def script(prompt: str, _: int) -> Answer:
        prompts.append(prompt)
        return Answer("fine")

    engine = ScriptedEngine(script)
    with serving(engine, served_of(engine, CHATML)) as server:
        plain = server.answer()
        whole = server.answer(**dict.fromkeys(HARMLESS, 5))
    assert prompts[0] == prompts[1]
    assert plain["choices"] == whole["choices"]


def ask(template: str, **body: Any) -> str:
    """The prompt that a request makes."""
    prompts: list[str] = []

    def script(prompt: str, _: int) -> Answer:
        prompts.append(prompt)
        return Answer("fine")

    engine = ScriptedEngine(script)
    with serving(engine, served_of(engine, template)) as server:
        server.answer(**body)
    return prompts[0]


def test_reasoning_is_switched_by_every_name() -> None:
    on, off = (ask(V31, chat_template_kwargs={"thinking": value}) for value in (True, False))
    assert on != off
    for body in ({"thinking": True}, {"enable_thinking": True}, {"thinking": {"type": "enabled"}}):
        assert ask(V31, **body) == on
    for body in (
        {"thinking": {"type": "disabled"}},
        {"enable_thinking": False},
        {"reasoning_effort": "none"},
        {"thinking": True, "chat_template_kwargs": {"thinking": False}},
    ):
        assert ask(V31, **body) == off
    effort = "{{ reasoning_effort }}, {{ messages[0].content }}"
    assert ask(effort, reasoning_effort="high").endswith("high, Hi")


def test_reasoning_that_nothing_switches_off_is_said() -> None:
    engine = ScriptedEngine(lambda *_: Answer("fine"))
    always = "{{ messages[0].content }}<think>{# up to #}</think>"
    with serving(engine, served_of(engine, always)) as server:
        error = error_of(server.chat(reasoning_effort="none"), 400)
        assert error["message"] == "this model's chat template cannot turn reasoning off"
        assert server.chat(reasoning_effort="low").status_code == 200
        error = error_of(server.chat(thinking={"type": "maybe"}), 400)
        assert error["message"].startswith("thinking")


def test_most_tokens_by_llama_server_s_name() -> None:
    engine = ScriptedEngine(lambda *_: Answer("one two three four"))
    with serving(engine, served_of(engine, CHATML)) as server:
        cut = server.answer(n_predict=5)["choices"][0]
        assert cut["finish_reason"] == "length"
        assert server.answer(n_predict=-1)["choices"][0]["finish_reason"] == "stop"
        error = error_of(server.chat(seed=2**63), 400)
        assert error["param"] == "seed"
        assert server.chat(seed=2**63 - 1).status_code == 200
        usage = error_of(server.chat(stream_options={"continuous_usage_stats": True}), 400)
        assert "continuous_usage_stats" in usage["param"]


def test_a_body_is_json_whatever_it_calls_itself() -> None:
    """As `curl -d` sends it; and answers carry the request's id."""
    engine = ScriptedEngine(lambda *_: Answer("fine"))
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()
    with serving(engine, served_of(engine, CHATML)) as server:
        for kind in ("application/x-www-form-urlencoded", "text/plain", None):
            headers = {} if kind is None else {"Content-Type": kind}
            done = server.client.post("/v1/chat/completions", content=body, headers=headers)
            assert done.status_code == 200
            assert done.headers["x-request-id"].startswith("req_")
            assert done.json()["system_fingerprint"].startswith("gguf-mtp-")
        mine = {"X-Request-Id": "mine-1"}
        assert server.client.get("/models", headers=mine).headers["x-request-id"] == "mine-1"
        wrong = server.client.get("/v1/nothing", headers={"X-Request-Id": "a b"})
        assert wrong.headers["x-request-id"].startswith("req_")
        short = server.client.post("/chat/completions", content=body)
        assert short.status_code == 200


def test_another_model_is_unknown_only_where_that_is_wanted() -> None:
    engine = ScriptedEngine(lambda *_: Answer("fine"))
    served = served_of(engine, CHATML)
    with serving(engine, served) as server:
        assert server.chat(model="gpt-4o").status_code == 200
    import dataclasses

    strict = dataclasses.replace(served, any_model=False)
    with serving(engine, strict) as server:
        error = error_of(server.chat(model="gpt-4o"), 404)
        assert (error["code"], error["message"]) == (
            "model_not_found",
            "this server has no model 'gpt-4o'",
        )
        assert server.chat(model=strict.name).status_code == 200
        assert server.chat().status_code == 200


def test_a_long_prompt_has_the_code_that_clients_know() -> None:
    engine = ScriptedEngine(lambda *_: Answer("fine"), n_ctx=100)
    with serving(engine, served_of(engine, CHATML)) as server:
        long = [{"role": "user", "content": "word " * 200_000}]
        assert error_of(server.chat(messages=long), 400)["code"] == "context_length_exceeded"
