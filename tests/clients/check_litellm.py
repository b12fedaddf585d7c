"""litellm against the demo model (argument 1) and a scripted one (argument 2)."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from importlib.metadata import version

import litellm

demo_url, scripted_url = sys.argv[1:]
ASK = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
options = {"model": "openai/demo", "api_base": demo_url, "api_key": "none", "temperature": 0}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}

answer = litellm.completion(messages=ASK, max_tokens=20, **options)
assert answer.choices[0].message.content == ANSWER, answer
assert answer.usage.completion_tokens > 5, answer

stream = litellm.completion(
    messages=ASK, stream=True, stream_options={"include_usage": True}, **options
)
chunks = list(stream)
assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == ANSWER
assert any(getattr(c, "usage", None) for c in chunks)


async def together() -> list[str]:
    answers = await asyncio.gather(
        *(litellm.acompletion(messages=ASK, **options) for _ in range(4))
    )
    return [a.choices[0].message.content for a in answers]


assert asyncio.run(together()) == [ANSWER] * 4

scripted = options | {"model": "openai/m", "api_base": scripted_url}
message = litellm.completion(messages=ASK, tools=[TOOL], **scripted).choices[0].message
[call] = message.tool_calls
assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Paris"}'), message
result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
final = litellm.completion(messages=[*ASK, message.model_dump(), result], tools=[TOOL], **scripted)
assert final.choices[0].message.content == "It is sunny in Paris.", final

with contextlib.suppress(litellm.ContextWindowExceededError):
    litellm.completion(messages=[{"role": "user", "content": "x" * 9000}], **scripted)
    raise AssertionError("a prompt that is too long was taken")
print(f"litellm {version('litellm')}: chat, usage, stream with usage, 4 at once,")
print("  tool call, round trip with its result, an over-long prompt as its own exception")
