"""An answer as Anthropic's clients read it: content blocks, whole or as events.

Source: https://docs.anthropic.com/en/docs/build-with-claude/streaming (as of 2026).
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

from gguf_mtp.answers.parse import Delta, End
from gguf_mtp.chat.tool_calls import CallStart
from gguf_mtp.server.error_responses import Problem
from gguf_mtp.server.plan import AnswerPlan
from gguf_mtp.server.responses import ResponseChoice

__all__ = ["AnthropicAnswer", "error_body", "object_of"]

_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


def error_body(problem: Problem) -> dict[str, Any]:
    """An error in Anthropic's shape."""
    kind = _ERRORS.get(problem.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": problem.message}}


class AnthropicAnswer:
    """See `DialectAnswer`. A stream's blocks follow one another: reasoning, text, calls."""

    media_type = "text/event-stream"
    still_there = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, plan: AnswerPlan, model: str) -> None:
        self.id = f"msg_{uuid.uuid4().hex}"
        self._n_prompt = len(plan.prompts[0])
        self._model = model
        self._index = -1
        self._kind = ""  # of the open block; "" where none is

    def whole(self, choice: ResponseChoice) -> dict[str, Any]:
        blocks: list[dict[str, Any]] = []
        if choice.reasoning:
            blocks.append({"type": "thinking", "thinking": choice.reasoning, "signature": ""})
        if choice.content:
            blocks.append({"type": "text", "text": choice.content})
        for call in choice.calls:
            function = call["function"]
            given = object_of(function["arguments"])
            blocks.append(
                {"type": "tool_use", "id": call["id"], "name": function["name"], "input": given}
            )
        assert choice.end
        return self._message(blocks) | _stop(choice.end) | {"usage": self._usage(choice.end)}

    def opening(self) -> Iterator[bytes]:
        usage = {"input_tokens": self._n_prompt, "output_tokens": 0}
        message = self._message([]) | {"stop_reason": None, "stop_sequence": None, "usage": usage}
        yield _event("message_start", message=message)

    def delta(self, delta: Delta) -> Iterator[bytes]:
        if delta.reasoning:
            thought = {"type": "thinking", "thinking": "", "signature": ""}
            yield from self._to("thinking", thought)
            yield self._add({"type": "thinking_delta", "thinking": delta.reasoning})
        if delta.content:
            yield from self._to("text", {"type": "text", "text": ""})
            yield self._add({"type": "text_delta", "text": delta.content})
        for event in delta.calls:
            if isinstance(event, CallStart):
                id_ = f"call_{uuid.uuid4().hex[:24]}"
                block: dict[str, Any] = {
                    "type": "tool_use",
                    "id": id_,
                    "name": event.name,
                    "input": {},
                }
                yield from self._to(f"call {event.number}", block)
            else:
                yield self._add({"type": "input_json_delta", "partial_json": event.text})

    def end(self, end: End) -> Iterator[bytes]:
        yield from self._close()
        yield _event("message_delta", delta=_stop(end), usage=self._usage(end))
        yield _event("message_stop")

    def failure(self, problem: Problem) -> Iterator[bytes]:
        body = error_body(problem)
        yield _event("error", error=body["error"])

    def _to(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        """Begins a block, unless one of this kind is open."""
        if self._kind == kind:
            return
        yield from self._close()
        self._kind = kind
        self._index += 1
        yield _event("content_block_start", index=self._index, content_block=block)

    def _add(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> Iterator[bytes]:
        if self._kind:
            yield _event("content_block_stop", index=self._index)
        self._kind = ""

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
        }

    def _usage(self, end: End) -> dict[str, Any]:
        """Tokens read from the cache are not among Anthropic's input tokens."""
        n_cached = end.stats.cached_tokens
        return {
            "input_tokens": self._n_prompt - n_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": n_cached,
            "output_tokens": end.n_tokens,
        }


def _stop(end: End) -> dict[str, Any]:
    if end.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": end.stop}
    return {"stop_reason": _STOPS[end.finish], "stop_sequence": None}


def object_of(arguments: str) -> Any:
    """A call's arguments; {} where the call was cut off, so that they are no whole object."""
    try:
        return json.loads(arguments)
    except ValueError:
        return {}


def _event(kind: str, **fields: Any) -> bytes:
    data = json.dumps({"type": kind, **fields}, ensure_ascii=False, separators=(",", ":"))
    return f"event: {kind}\ndata: {data}\n\n".encode()
