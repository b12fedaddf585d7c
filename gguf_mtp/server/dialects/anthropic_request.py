"""Anthropic's `POST /v1/messages`: its body, and the chat request that it asks for.

Source: https://docs.anthropic.com/en/api/messages (as of 2026).
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from gguf_mtp.errors import RequestError
from gguf_mtp.server.dialects.exchange import function_tool, text_of
from gguf_mtp.server.field_tables import Neutral, refused
from gguf_mtp.server.schemas import MAX_MESSAGES, MAX_TOOLS, Body, ChatRequest, Thinking

__all__ = ["CountTokens", "MessagesRequest", "chat_request"]

NOT_BUILT: Neutral = {
    "container": (),
    "context_management": ({}, {"edits": []}),
    "mcp_servers": ([],),
}
"""Fields that ask for another answer, and the values that do not."""
_TEXT = ("text",)


class AnthropicMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class AnthropicTool(Body):
    """A tool of the client's. Those that Anthropic runs itself have another `type`."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class AnthropicToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class AnthropicFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: str | None = None
    format: AnthropicFormat | None = None


class CountTokens(Body):
    """`POST /v1/messages/count_tokens`: what a prompt is made of."""

    model: str | None = None
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[dict[str, Any]] | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: AnthropicFormat | None = None


class MessagesRequest(CountTokens):
    """`POST /v1/messages`."""

    max_tokens: Annotated[int, Field(ge=1)]
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None


def chat_request(body: CountTokens) -> ChatRequest:
    """The same, as a chat request. Raises `RequestError` for what this server cannot do."""
    name = refused(body.model_extra or {}, (NOT_BUILT,))
    if name is not None:
        raise RequestError(f"{name} is not supported; omit it")
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": text_of(body.system, "system", _TEXT)})
    for i, message in enumerate(body.messages):
        messages += _messages(message, f"messages[{i}].content")
    fields: dict[str, Any] = {"model": body.model, "messages": messages}
    if body.tools:
        fields["tools"] = [_tool(tool, i) for i, tool in enumerate(body.tools)]
    fields |= _choice(body.tool_choice)
    if body.thinking is not None:
        fields["thinking"] = {"type": body.thinking.type}
    config = body.output_config or OutputConfig()
    if config.effort is not None:
        fields["reasoning_effort"] = config.effort
    form = config.format or body.output_format
    if form is not None:
        schema = {"name": "answer", "schema": form.schema_, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(body, MessagesRequest):
        fields |= {name: getattr(body, name) for name in ("temperature", "top_p", "top_k")}
        fields |= {"max_tokens": body.max_tokens, "stop": body.stop_sequences}
        fields["stream"] = body.stream
    return ChatRequest.model_validate(fields)


def _messages(message: AnthropicMessage, where: str) -> list[dict[str, Any]]:
    """Results of tools come first: templates want them right behind the calls."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results: list[dict[str, Any]] = []
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(message.content):
        kind = block.get("type")
        place = f"{where}[{i}]"
        if kind == "tool_result":
            results.append(_result(block, place))
        elif kind == "tool_use":
            calls.append(_call(block, place))
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif kind != "redacted_thinking":
            texts.append(text_of([block], place.removesuffix(f"[{i}]"), _TEXT))
    said: dict[str, Any] = {"role": message.role, "content": "\n".join(texts)}
    if thoughts:
        said["reasoning_content"] = "\n".join(thoughts)
    if calls:
        said["tool_calls"] = calls
    is_empty = not (texts or thoughts or calls)
    return [*results, *([] if results and is_empty else [said])]


def _result(block: dict[str, Any], where: str) -> dict[str, Any]:
    text = text_of(block.get("content"), f"{where}.content", _TEXT)
    if block.get("is_error"):
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": str(block.get("tool_use_id", "")), "content": text}


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    name, given = block.get("name"), block.get("input")
    if not isinstance(name, str) or not isinstance(given, dict):
        raise RequestError(f"{where} must have a name and an input that is an object")
    function = {"name": name, "arguments": json.dumps(given, ensure_ascii=False)}
    return {"id": str(block.get("id", "")), "type": "function", "function": function}


def _tool(tool: AnthropicTool, i: int) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise RequestError(f"tools[{i}] is {tool.type!r}, which only Anthropic's own servers run")
    return function_tool(tool.name, tool.description, tool.input_schema, tool.strict)


def _choice(choice: AnthropicToolChoice | None) -> dict[str, Any]:
    if choice is None:
        return {}
    kinds: dict[str, Any] = {"auto": "auto", "any": "required", "none": "none"}
    found = kinds.get(choice.type)
    if choice.type == "tool":
        if choice.name is None:
            raise RequestError("tool_choice of type 'tool' must have a name")
        found = {"type": "function", "function": {"name": choice.name}}
    return {
        "tool_choice": found,
        "parallel_tool_calls": not choice.disable_parallel_tool_use,
    }
