"""OpenAI's own Python package against the server, unchanged."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from gguf_mtp.errors import Unavailable
from gguf_mtp.server.access import Access
from gguf_mtp.server.app import ServerOptions
from tests.support.chat_formats import R1, V31
from tests.support.scripted import Answer, ScriptedEngine
from tests.support.serving import served_of, serving

pytestmark = pytest.mark.server

ASK = [{"role": "user", "content": "Weather in Paris?"}]
CALLS = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Paris"}'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather now.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.fixture
def url() -> Iterator[str]:
    """A model that calls a tool when it is offered one, and otherwise says hello."""

    def script(prompt: str, _: int) -> Answer:
        if "tool▁output▁begin" in prompt:
            return Answer("It is sunny.")
        return Answer(CALLS if "## Tools" in prompt else "Hello, Wörld.")

    engine = ScriptedEngine(script, n_seq=4)
    options = ServerOptions(Access(api_key="key"))
    with serving(engine, served_of(engine, V31), options) as server:
        yield f"{server.url}/v1"


@pytest.fixture
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=url, api_key="key", max_retries=0) as made:
        yield made


def test_chat_and_usage(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="gpt-4o", messages=ASK, max_tokens=100, seed=1)
    [choice] = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("Hello, Wörld.", "stop")
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (
        14,
        14 + answer.usage.prompt_tokens,
    )
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.model_extra is not None
    assert answer.model_extra["timings"]["decode_tokens"] == 14


def test_stream_with_usage(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model="m", messages=ASK, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "Hello, Wörld."
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 14


def test_the_stream_helper_puts_everything_together(client: OpenAI) -> None:
    with client.chat.completions.stream(model="m", messages=ASK, tools=[TOOL]) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    [call] = final.choices[0].message.tool_calls or []
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Paris"}')
    assert final.choices[0].finish_reason == "tool_calls"


def test_a_tool_round_trip(client: OpenAI) -> None:
    first = client.chat.completions.create(model="m", messages=ASK, tools=[TOOL])
    message = first.choices[0].message
    [call] = message.tool_calls or []
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert message.content is None
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    messages = [*ASK, message.model_dump(), result]  # nulls and all
    second = client.chat.completions.create(model="m", messages=messages, tools=[TOOL])
    assert second.choices[0].message.content == "It is sunny."


def test_async_clients_together(url: str) -> None:
    async def ask(client: AsyncOpenAI, i: int) -> str:
        if i % 2:
            whole = await client.chat.completions.create(model="m", messages=ASK)
            return whole.choices[0].message.content or ""
        stream = await client.chat.completions.create(model="m", messages=ASK, stream=True)
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    async def main() -> list[str]:
        async with AsyncOpenAI(base_url=url, api_key="key") as client:
            return await asyncio.gather(*(ask(client, i) for i in range(8)))

    assert asyncio.run(main()) == ["Hello, Wörld."] * 8


def test_completions_models_and_choices(client: OpenAI) -> None:
    text = client.completions.create(model="m", prompt="Once", n=2)
    assert [c.text for c in text.choices] == ["Hello, Wörld."] * 2
    chunks = list(client.completions.create(model="m", prompt=[1, 2], stream=True))
    assert "".join(c.choices[0].text for c in chunks) == "Hello, Wörld."
    assert [m.id for m in client.models.list()] == ["scripted"]
    assert client.models.retrieve("scripted").owned_by == "gguf-mtp"
    two = client.chat.completions.create(model="m", messages=ASK, n=2, stop=["W"])
    assert [c.message.content for c in two.choices] == ["Hello, "] * 2


def test_reasoning_stays_apart() -> None:
    engine = ScriptedEngine(lambda *_: Answer("Hm.\n</think>\n\nParis."))
    with (
        serving(engine, served_of(engine, R1)) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
    ):
        message = client.chat.completions.create(model="m", messages=ASK).choices[0].message
    assert message.content == "Paris."
    assert message.model_extra == {"reasoning_content": "Hm."}


def test_errors_are_the_exceptions_that_clients_know(url: str, client: OpenAI) -> None:
    create = client.chat.completions.create
    with pytest.raises(openai.BadRequestError) as long:
        create(model="m", messages=[{"role": "user", "content": "x" * 2000}])
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as wrong:
        create(model="m", messages=ASK, top_logprobs=2)
    assert "logprobs is not true" in wrong.value.message
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4o")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="m", input="x")
    with (
        OpenAI(base_url=url, api_key="wrong") as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_a_client_comes_again_to_a_busy_server() -> None:
    """503 with Retry-After is what the client's own retries understand."""
    engine = ScriptedEngine(lambda *_: Answer("fine"))
    with serving(engine, served_of(engine, V31)) as server:
        seen: list[httpx.Response] = []
        real = server.worker.submit

        def busy_once(jobs):
            if len(seen) == 0:
                raise Unavailable("the server is busy")
            return real(jobs)

        server.worker.submit = busy_once
        http = httpx.Client(event_hooks={"response": [seen.append]}, trust_env=False)
        with OpenAI(base_url=f"{server.url}/v1", api_key="x", http_client=http) as client:
            answer = client.chat.completions.create(model="m", messages=ASK)
    assert answer.choices[0].message.content == "fine"
    assert [r.status_code for r in seen] == [503, 200]
    assert seen[0].headers["retry-after"]
