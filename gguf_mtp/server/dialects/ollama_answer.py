"""An answer as Ollama's clients read it: one JSON object, or one a line.

Source: https://github.com/ollama/ollama/blob/main/docs/api.md (as of 2026).
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

from gguf_mtp.answers.parse import Delta, End
from gguf_mtp.server.dialects.anthropic_answer import object_of
from gguf_mtp.server.error_responses import Problem
from gguf_mtp.server.responses import ResponseChoice

__all__ = ["OllamaAnswer", "error_body", "loaded", "moment"]


def error_body(problem: Problem) -> dict[str, Any]:
    """An error in Ollama's shape."""
    return {"error": problem.message}


def moment(seconds: float | None = None) -> str:
    """A point in time, by default now, as Ollama writes it."""
    when = (
        datetime.now(timezone.utc)
        if seconds is None
        else datetime.fromtimestamp(seconds, timezone.utc)
    )
    return when.isoformat().replace("+00:00", "Z")


def loaded(model: str, is_chat: bool) -> dict[str, Any]:
    """The answer to a request without a prompt, which in Ollama loads the model."""
    said: dict[str, Any] = {"response": ""}
    if is_chat:
        said = {"message": {"role": "assistant", "content": ""}}
    return {"model": model, "created_at": moment(), **said, "done": True, "done_reason": "load"}


class OllamaAnswer:
    """See `DialectAnswer`. Calls come whole, in a line of their own before the last."""

    media_type = "application/x-ndjson"

    def __init__(self, n_prompt: int, model: str, is_chat: bool) -> None:
        self.id = f"ollama-{uuid.uuid4().hex}"
        self._n_prompt, self._model, self._is_chat = n_prompt, model, is_chat
        self._choice = ResponseChoice()

    @property
    def still_there(self) -> bytes:
        """A line that adds nothing: clients parse each one."""
        return _line(self._said({"content": ""}))

    def whole(self, choice: ResponseChoice) -> dict[str, Any]:
        said: dict[str, Any] = {"content": choice.content}
        if choice.reasoning:
            said["thinking"] = choice.reasoning
        if choice.calls:
            said["tool_calls"] = _calls(choice)
        assert choice.end
        return self._said(said) | self._done(choice.end)

    def opening(self) -> Iterator[bytes]:
        yield from ()

    def delta(self, delta: Delta) -> Iterator[bytes]:
        self._choice.add(delta)
        if delta.reasoning:
            yield _line(self._said({"content": "", "thinking": delta.reasoning}))
        if delta.content:
            yield _line(self._said({"content": delta.content}))

    def end(self, end: End) -> Iterator[bytes]:
        if self._choice.calls:
            yield _line(self._said({"content": "", "tool_calls": _calls(self._choice)}))
        yield _line(self._said({"content": ""}) | self._done(end))

    def failure(self, problem: Problem) -> Iterator[bytes]:
        yield _line(error_body(problem))

    def _said(self, said: dict[str, Any]) -> dict[str, Any]:
        """A line of `/api/chat`, or of `/api/generate`, which calls the content response."""
        head = {"model": self._model, "created_at": moment()}
        if self._is_chat:
            return {**head, "message": {"role": "assistant", **said}, "done": False}
        return {**head, "response": said.pop("content"), **said, "done": False}

    def _done(self, end: End) -> dict[str, Any]:
        """What the last line adds; times in nanoseconds."""
        stats = end.stats
        prompt, answer = (round(1e9 * s) for s in (stats.prefill_s, stats.decode_s))
        return {
            "done": True,
            "done_reason": "length" if end.finish == "length" else "stop",
            "total_duration": prompt + answer,
            "load_duration": 0,
            "prompt_eval_count": self._n_prompt,
            "prompt_eval_duration": prompt,
            "eval_count": end.n_tokens,
            "eval_duration": answer,
        }


def _calls(choice: ResponseChoice) -> list[dict[str, Any]]:
    """Arguments are an object there."""
    functions = [call["function"] for call in choice.calls]
    return [
        {"function": {"name": one["name"], "arguments": object_of(one["arguments"])}}
        for one in functions
    ]


def _line(data: dict[str, Any]) -> bytes:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
