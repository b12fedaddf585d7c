"""langchain-openai against the demo model (argument 1) and a scripted one (argument 2)."""

from __future__ import annotations

import asyncio
import sys
from importlib.metadata import version

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

demo_url, scripted_url = sys.argv[1:]
options = {"api_key": "none", "max_retries": 0, "temperature": 0}
demo = ChatOpenAI(base_url=demo_url, model="demo", max_tokens=20, **options)
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."

answer = demo.invoke(QUESTION)
assert answer.content == ANSWER, answer
assert answer.usage_metadata["output_tokens"] > 5, answer
assert answer.response_metadata["finish_reason"] == "stop", answer

chunks = list(demo.stream(QUESTION, stream_usage=True))
whole = sum(chunks[1:], chunks[0])
assert len(chunks) > 3
assert whole.content == ANSWER, whole
assert whole.usage_metadata == answer.usage_metadata | {
    "input_token_details": whole.usage_metadata["input_token_details"]
}, whole


async def together() -> list[str]:
    return [m.content for m in await demo.abatch([QUESTION] * 4)]


assert asyncio.run(together()) == [ANSWER] * 4
assert OpenAI(base_url=demo_url, model="demo", **options).invoke("Once upon a time").strip()


@tool
def weather(city: str) -> str:
    """The weather now."""
    return f"sunny in {city}"


class Place(BaseModel):
    """weather"""

    city: str


scripted = ChatOpenAI(base_url=scripted_url, model="m", **options)
caller = scripted.bind_tools([weather])
called = caller.invoke("Weather in Paris?")
[call] = called.tool_calls
assert (call["name"], call["args"]) == ("weather", {"city": "Paris"}), called
result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
final = caller.invoke([HumanMessage("Weather in Paris?"), called, result])
assert final.content == "It is sunny in Paris.", final
parts = list(caller.stream("Weather in Paris?"))
[streamed] = sum(parts[1:], parts[0]).tool_calls
assert (streamed["name"], streamed["args"]) == ("weather", {"city": "Paris"}), parts
structured = scripted.with_structured_output(Place, method="function_calling")
assert structured.invoke("Where?") == Place(city="Paris")
print(
    f"langchain-openai {version('langchain-openai')}: chat, usage, stream, 4 at once, completion,"
)
print("  tool call, round trip with its result, streamed call, structured output by a forced call")
