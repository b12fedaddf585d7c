"""The ollama package against the demo model (argument 1) and a scripted one (argument 2)."""

from __future__ import annotations

import sys
from importlib.metadata import version

import ollama

demo_url, scripted_url = (url.removesuffix("/v1") for url in sys.argv[1:])
ASK = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
COLD = {"temperature": 0, "num_predict": 20}


def weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


demo = ollama.Client(demo_url)
answer = demo.chat(model="demo", messages=ASK, options=COLD)
assert answer.message.content == ANSWER, answer
assert answer.done_reason == "stop", answer
assert answer.eval_count > 5, answer
streamed = list(demo.chat(model="demo", messages=ASK, options=COLD, stream=True))
assert "".join(part.message.content for part in streamed) == ANSWER
assert [part.done for part in streamed] == [False] * (len(streamed) - 1) + [True]
assert demo.generate(model="demo", prompt=ASK[0]["content"], options=COLD).response == ANSWER
parts = demo.generate(model="demo", prompt=ASK[0]["content"], options=COLD, stream=True)
assert "".join(part.response for part in parts) == ANSWER
[model] = demo.list().models
assert demo.show(model.model).capabilities[0] == "completion"
assert demo.ps().models[0].model == model.model

scripted = ollama.Client(scripted_url)
called = scripted.chat(model="m", messages=ASK, tools=[weather])
[call] = called.message.tool_calls
assert (call.function.name, call.function.arguments) == ("weather", {"city": "Paris"}), call
lines = list(scripted.chat(model="m", messages=ASK, tools=[weather], stream=True))
[same] = [call for line in lines for call in line.message.tool_calls or []]
assert same == call
result = {"role": "tool", "tool_name": "weather", "content": weather(**call.function.arguments)}
final = scripted.chat(model="m", messages=[*ASK, called.message, result], tools=[weather])
assert final.message.content == "It is sunny in Paris.", final

said = ""
try:
    scripted.chat(model="m", messages=[{"role": "user", "content": "x" * 9000}])
except ollama.ResponseError as error:
    said = f"{error.status_code} {error.error}"
assert said.startswith("400 This model's maximum context length is"), said
print(f"ollama {version('ollama')}: chat and generate, whole and streamed, list, show, ps,")
print("  tool call whole and streamed, round trip with its result, an over-long prompt as a 400")
