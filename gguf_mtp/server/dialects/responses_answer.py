"""An answer as clients of OpenAI's Responses read it: output items, whole or as events.

Source: https://platform.openai.com/docs/api-reference/responses-streaming (as of 2026).
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gguf_mtp.answers.parse import Delta, End
from gguf_mtp.chat.tool_calls import CallStart
from gguf_mtp.server.dialects.responses_request import ResponsesRequest
from gguf_mtp.server.error_responses import Problem
from gguf_mtp.server.plan import AnswerPlan
from gguf_mtp.server.responses import ResponseChoice, timings

__all__ = ["ResponsesAnswer"]


class ResponsesAnswer:
    """See `DialectAnswer`. Output items follow one another: reasoning, a message, calls.

    `output` holds the finished items, as the next turn's input may give them back; `keep` is called
    with the finished response.
    """

    media_type = "text/event-stream"
    still_there = b": reading the prompt\n\n"

    def __init__(
        self,
        plan: AnswerPlan,
        model: str,
        created: int,
        asked: ResponsesRequest,
        keep: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self.id = f"resp_{uuid.uuid4().hex}"
        self.output: list[dict[str, Any]] = []
        self._n_prompt = len(plan.prompts[0])
        self._head = {"id": self.id, "object": "response", "created_at": created, "model": model}
        self._asked, self._keep = asked, keep
        self._n_events = 0
        self._open: dict[str, Any] | None = None

    def whole(self, choice: ResponseChoice) -> dict[str, Any]:
        if choice.reasoning:
            self.output.append(_reasoning(choice.reasoning))
        if choice.content:
            self.output.append(_message(choice.content))
        for call in choice.calls:
            function = call["function"]
            item = _call(function["name"]) | {"arguments": function["arguments"]}
            self.output.append(item | {"call_id": call["id"]})
        assert choice.end
        return self._finished(choice.end)

    def opening(self) -> Iterator[bytes]:
        begun = self._response("in_progress", None)
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)

    def delta(self, delta: Delta) -> Iterator[bytes]:
        if delta.reasoning:
            yield from self._to("reasoning", _reasoning(""))
            yield from self._add("response.reasoning_text.delta", delta.reasoning)
        if delta.content:
            yield from self._to("message", _message(""))
            yield from self._add("response.output_text.delta", delta.content)
        for event in delta.calls:
            if isinstance(event, CallStart):
                yield from self._close()
                yield from self._to("function_call", _call(event.name))
            elif self._open is not None:
                self._open["arguments"] += event.text
                yield self._event(
                    "response.function_call_arguments.delta", **self._place(), delta=event.text
                )

    def end(self, end: End) -> Iterator[bytes]:
        yield from self._close()
        response = self._finished(end)
        yield self._event(f"response.{response['status']}", response=response)

    def failure(self, problem: Problem) -> Iterator[bytes]:
        error = {"code": problem.code or "server_error", "message": problem.message}
        yield self._event("response.failed", response=self._response("failed", None, error))

    # -- items ---------------------------------------------------------------------------------

    def _to(self, kind: str, item: dict[str, Any]) -> Iterator[bytes]:
        """Begins an item, unless one of this kind is open."""
        if self._open is not None and self._open["type"] == kind:
            return
        yield from self._close()
        self._open = item
        shown = {**item, "status": "in_progress"}
        part = item["content"][0] if "content" in item else None
        if part:
            shown["content"] = []
        yield self._event("response.output_item.added", output_index=len(self.output), item=shown)
        if part:
            yield self._event("response.content_part.added", **self._part(), part=dict(part))

    def _add(self, kind: str, text: str) -> Iterator[bytes]:
        assert self._open
        self._open["content"][0]["text"] += text
        extra: dict[str, Any] = {"logprobs": []} if kind.startswith("response.output_text") else {}
        yield self._event(kind, **self._part(), delta=text, **extra)

    def _close(self) -> Iterator[bytes]:
        item, place = self._open, self._place()
        if item is None:
            return
        if item["type"] == "function_call":
            yield self._event(
                "response.function_call_arguments.done",
                **place,
                name=item["name"],
                arguments=item["arguments"],
            )
        else:
            part = item["content"][0]
            if item["type"] == "message":
                done = {"text": part["text"], "logprobs": []}
                yield self._event("response.output_text.done", **self._part(), **done)
            else:
                yield self._event("response.reasoning_text.done", **self._part(), text=part["text"])
            yield self._event("response.content_part.done", **self._part(), part=part)
        index = len(self.output)
        self.output.append(item)
        self._open = None
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._open["id"] if self._open else "", "output_index": len(self.output)}

    def _part(self) -> dict[str, Any]:
        return {**self._place(), "content_index": 0}

    # -- the response --------------------------------------------------------------------------

    def _finished(self, end: End) -> dict[str, Any]:
        is_cut = end.finish == "length"
        if is_cut and self.output:
            self.output[-1]["status"] = "incomplete"
        response = self._response("incomplete" if is_cut else "completed", end)
        if is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        self._keep(response)
        return response

    def _response(
        self, status: str, end: End | None, error: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        asked = self._asked
        given = asked.model_dump(by_alias=True, exclude_none=True)
        return {
            **self._head,
            "status": status,
            "error": error,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "output": list(self.output),
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": asked.previous_response_id,
            "reasoning": given.get("reasoning", {}),
            "store": asked.store is not False,
            "temperature": asked.temperature,
            "text": given.get("text", {"format": {"type": "text"}}),
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": given.get("tools", []),
            "top_p": asked.top_p,
            "truncation": "disabled",
            "usage": self._usage(end) if end else None,
        } | ({"timings": timings(end.stats)} if end else {})

    def _usage(self, end: End) -> dict[str, Any]:
        return {
            "input_tokens": self._n_prompt,
            "input_tokens_details": {"cached_tokens": end.stats.cached_tokens},
            "output_tokens": end.n_tokens,
            "output_tokens_details": {"reasoning_tokens": end.n_reasoning},
            "total_tokens": self._n_prompt + end.n_tokens,
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        whole = {"type": kind, "sequence_number": self._n_events, **fields}
        self._n_events += 1
        data = json.dumps(whole, ensure_ascii=False, separators=(",", ":"))
        return f"event: {kind}\ndata: {data}\n\n".encode()


def _reasoning(text: str) -> dict[str, Any]:
    part = {"type": "reasoning_text", "text": text}
    return {"type": "reasoning", "id": _id("rs"), "summary": [], "content": [part]}


def _message(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    head = {"type": "message", "id": _id("msg"), "role": "assistant", "status": "completed"}
    return head | {"content": [part]}


def _call(name: str) -> dict[str, Any]:
    head = {"type": "function_call", "id": _id("fc"), "status": "completed"}
    return head | {"call_id": _id("call"), "name": name, "arguments": ""}


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex[:24]}"
