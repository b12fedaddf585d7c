"""openai-agents, whose default is /v1/responses, against the demo model (argument 1) and a scripted
one that calls tools (argument 2)."""

from __future__ import annotations

import asyncio
import sys
from importlib.metadata import version

from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled
from agents.models.openai_responses import OpenAIResponsesModel
from openai import AsyncOpenAI, OpenAI

demo_url, scripted_url = sys.argv[1:]
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
set_tracing_disabled(True)
asked: list[str] = []


@function_tool
def weather(city: str) -> str:
    """The weather of a city."""
    asked.append(city)
    return "sunny"


def agent(url: str, **more: object) -> Agent:
    model = OpenAIResponsesModel("m", AsyncOpenAI(base_url=url, api_key="none"))
    settings = ModelSettings(temperature=0)
    return Agent("a", model=model, model_settings=settings, **more)  # type: ignore[arg-type]


async def main() -> None:
    plain = await Runner.run(agent(demo_url), QUESTION)
    assert plain.final_output == ANSWER, plain
    streamed = Runner.run_streamed(agent(demo_url), QUESTION)
    async for _ in streamed.stream_events():
        pass
    assert streamed.final_output == ANSWER, streamed
    helped = await Runner.run(agent(scripted_url, tools=[weather]), "What is the weather?")
    assert helped.final_output == "It is sunny in Paris.", helped
    watched = Runner.run_streamed(agent(scripted_url, tools=[weather]), "What is the weather?")
    async for _ in watched.stream_events():
        pass
    assert watched.final_output == "It is sunny in Paris.", watched
    assert asked == ["Paris", "Paris"], asked


asyncio.run(main())

client = OpenAI(base_url=demo_url, api_key="none")
first = client.responses.create(model="m", input=QUESTION, temperature=0)
assert first.output_text == ANSWER, first
assert first.status == "completed", first
second = client.responses.create(
    model="m", input="And of Italy?", temperature=0, previous_response_id=first.id
)
assert second.usage.input_tokens > first.usage.input_tokens + 5, second
assert client.responses.retrieve(first.id).output_text == ANSWER
client.responses.delete(first.id)
cut = client.responses.create(model="m", input=QUESTION, temperature=0, max_output_tokens=3)
assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens"), cut
print(f"openai-agents {version('openai-agents')}: run, stream, tools whole and streamed;")
print("  openai's responses: create, previous_response_id, retrieve, delete, cut at the limit")
