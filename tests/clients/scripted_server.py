"""A server whose model calls a tool when it is offered one: for clients in other languages.

Prints its address and runs until it is ended.
"""

from __future__ import annotations

import signal

from tests.support.chat_formats import V31
from tests.support.scripted import Answer, ScriptedEngine
from tests.support.serving import served_of, serving

CALL = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Paris"}'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)


def script(prompt: str, _: int) -> Answer:
    if "<｜tool▁output▁begin｜>" in prompt:
        return Answer("It is sunny in Paris.")
    if prompt.endswith("<｜tool▁sep｜>"):  # a call that must be made is begun in the prompt
        return Answer('{"city": "Paris"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>')
    return Answer(CALL if "## Tools" in prompt else "Hello, Wörld.")


if __name__ == "__main__":
    engine = ScriptedEngine(script, n_seq=4, n_ctx=4000)
    with serving(engine, served_of(engine, V31)) as server:
        print(f"{server.url}/v1", flush=True)
        signal.pause()
