"""The anthropic package against the demo model (argument 1) and a scripted one (argument 2)."""

from __future__ import annotations

import sys
from importlib.metadata import version

import anthropic

demo_url, scripted_url = (url.removesuffix("/v1") for url in sys.argv[1:])
ASK = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
TOOL = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}

demo = anthropic.Anthropic(base_url=demo_url, api_key="none")
message = demo.messages.create(
    model="demo", max_tokens=20, messages=ASK, extra_body={"temperature": 0}
)
[block] = message.content
assert (block.type, block.text) == ("text", ANSWER), message
assert message.stop_reason == "end_turn", message
assert message.usage.output_tokens > 5, message

with demo.messages.stream(
    model="demo", max_tokens=20, messages=ASK, extra_body={"temperature": 0}
) as stream:
    assert "".join(stream.text_stream) == ANSWER
    assert stream.get_final_message().stop_reason == "end_turn"

counted = demo.messages.count_tokens(model="demo", messages=ASK)
usage = message.usage
assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens

scripted = anthropic.Anthropic(base_url=scripted_url, api_key="none")
options = {"model": "m", "max_tokens": 60, "tools": [TOOL]}
called = scripted.messages.create(messages=ASK, **options)
assert called.stop_reason == "tool_use", called
[call] = called.content
assert (call.name, call.input) == ("weather", {"city": "Paris"}), call
with scripted.messages.stream(messages=ASK, **options) as stream:
    [streamed] = stream.get_final_message().content
assert (streamed.name, streamed.input) == ("weather", {"city": "Paris"}), streamed
result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
conversation = [
    *ASK,
    {"role": "assistant", "content": called.content},
    {"role": "user", "content": [result]},
]
final = scripted.messages.create(messages=conversation, **options)
assert final.content[0].text == "It is sunny in Paris.", final

refusal = None
try:
    scripted.messages.create(
        model="m", max_tokens=9, messages=[{"role": "user", "content": "x" * 9000}]
    )
except anthropic.BadRequestError as error:
    refusal = error.body
assert refusal["type"] == "error", refusal
assert refusal["error"]["type"] == "invalid_request_error", refusal
assert "maximum context length" in refusal["error"]["message"], refusal
print(f"anthropic {version('anthropic')}: message, stream, count_tokens,")
print("  tool call whole and streamed, round trip with its result, an over-long prompt as a 400")
