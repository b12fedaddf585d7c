"""Ollama's `POST /api/chat` and `/api/generate`: their bodies, and the requests that they mean.

Source: https://github.com/ollama/ollama/blob/main/docs/api.md (as of 2026).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from gguf_mtp.errors import RequestError
from gguf_mtp.server.field_tables import Neutral, refused
from gguf_mtp.server.schemas import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Body,
    ChatRequest,
    CompletionRequest,
    Tool,
    ToolCall,
)

__all__ = ["OllamaChat", "OllamaGenerate", "chat_request", "generate_request"]

NOT_BUILT: Neutral = {
    "context": ([],),
    "images": ([],),
    "logprobs": (False,),
    "suffix": ("",),
    "template": ("",),
}
"""Fields that ask for another answer, and the values that do not."""
_OPTIONS = (
    "temperature", "top_k", "top_p", "min_p", "typical_p", "repeat_last_n", "repeat_penalty",
    "presence_penalty", "frequency_penalty", "seed", "stop", "mirostat",
)  # fmt: skip
"""Options that are called the same here; others are about loading."""


class OllamaMessage(Body):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_name: str | None = None


class OllamaBody(Body):
    """What both endpoints take."""

    model: str | None = None
    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    think: bool | str | None = None


class OllamaChat(OllamaBody):
    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES)] = Field(
        default_factory=list
    )
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None


class OllamaGenerate(OllamaBody):
    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None


def chat_request(body: OllamaChat) -> ChatRequest:
    """The same, as a chat request. Raises `RequestError` for what this server cannot do."""
    messages = []
    for i, one in enumerate(body.messages):
        if one.images:
            raise RequestError(f"messages[{i}] has images, but this model reads only text")
        said: dict[str, Any] = {"role": one.role, "content": one.content or ""}
        if one.thinking:
            said["reasoning_content"] = one.thinking
        if one.tool_calls:
            said["tool_calls"] = one.tool_calls
        messages.append(said)
    fields = {**_fields(body), "messages": messages, "tools": body.tools}
    return ChatRequest.model_validate(fields)


def generate_request(body: OllamaGenerate) -> ChatRequest | CompletionRequest:
    """The same: with `raw` a completion, else a chat of one question. Raises `RequestError`."""
    if body.raw:
        fields = {**_fields(body), "prompt": body.prompt or ""}
        fields.setdefault("max_tokens", -1)
        return CompletionRequest.model_validate(fields)
    messages = [{"role": "system", "content": body.system}] if body.system else []
    messages.append({"role": "user", "content": body.prompt or ""})
    return ChatRequest.model_validate({**_fields(body), "messages": messages})


def _fields(body: OllamaBody) -> dict[str, Any]:
    """Of either request. Streams are the default."""
    name = refused(body.model_extra or {}, (NOT_BUILT,))
    if name is not None:
        raise RequestError(f"{name} is not supported; omit it")
    options = body.options or {}
    found: dict[str, Any] = {"model": body.model, "stream": body.stream is not False}
    found |= {name: options[name] for name in _OPTIONS if options.get(name) is not None}
    most = options.get("num_predict")
    if most is not None:
        found["max_tokens"] = -1 if most == -2 else most  # -2: until the context is full
    if body.think is not None:
        found["thinking"] = bool(body.think)
    if isinstance(body.think, str):
        found["reasoning_effort"] = body.think
    if body.format == "json":
        found["response_format"] = {"type": "json_object"}
    elif body.format:
        schema = {"name": "answer", "schema": body.format, "strict": True}
        found["response_format"] = {"type": "json_schema", "json_schema": schema}
    return found
