"""Messages of an OpenAI request -> messages that a chat template takes; what is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gguf_mtp.errors import RequestError

__all__ = ["Message", "check_function", "for_template"]

Message = Mapping[str, Any]
_FOR_TEMPLATES = ("role", "name", "tool_calls", "tool_call_id", "reasoning_content")
_MAY_BE_EMPTY = ("assistant", "tool")
"""Roles whose content clients leave out: a turn of reasoning only, a tool that returns nothing."""


def for_template(messages: Sequence[Message]) -> list[Message]:
    """Raises `RequestError` for what is no conversation."""
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
    if not is_list or not all(isinstance(message, Mapping) for message in messages):
        raise RequestError('messages must be a list like [{"role": "user", "content": "Hello"}]')
    if not messages:
        raise RequestError("messages is empty")
    return [_message(index, message) for index, message in enumerate(messages)]


def _message(index: int, message: Message) -> dict[str, Any]:
    """The message for a template; content is text, None only beside tool calls."""
    out = {key: message[key] for key in _FOR_TEMPLATES if message.get(key) is not None}
    if message.get("reasoning") is not None:  # vLLM's new name
        out.setdefault("reasoning_content", message["reasoning"])
    content, calls = message.get("content"), message.get("tool_calls")
    if not isinstance(message.get("role"), str):
        raise RequestError(f"messages[{index}] has no role")
    if isinstance(content, list):
        content = "\n".join(_text_of(index, part) for part in content)
    if content is not None and not isinstance(content, str):
        raise RequestError(f"messages[{index}] has a content that is neither text nor a list")
    if content is None and not calls:
        if message["role"] not in _MAY_BE_EMPTY:
            raise RequestError(f"messages[{index}] has no content")
        content = ""
    if calls:
        for call in calls:
            check_function(call, f"messages[{index}].tool_calls")
        out["tool_calls"] = [_call(call) for call in calls]
    else:
        out.pop("tool_calls", None)
    return out | {"content": content}


def check_function(one: Any, place: str) -> None:
    """Raises `RequestError` unless it is a tool or a call with a function's name."""
    function = one.get("function") if isinstance(one, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise RequestError(f"{place} has no function with a name")


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = {"arguments": "{}", **{k: v for k, v in call["function"].items() if v is not None}}
    if not isinstance(function["arguments"], str):  # ollama's clients send them as they are
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return {**{k: v for k, v in call.items() if v is not None}, "function": function}


def _text_of(index: int, part: Mapping[str, Any]) -> str:
    if part.get("type") != "text" or part.get("text") is None:
        raise RequestError(
            f"messages[{index}] has a content part of type {part.get('type')!r}; "
            "only parts of type 'text' with a text are supported"
        )
    return str(part["text"])
