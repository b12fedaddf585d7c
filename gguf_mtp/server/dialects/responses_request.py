"""OpenAI's `POST /v1/responses`: its body, and the chat request that it asks for.

Source: https://platform.openai.com/docs/api-reference/responses/create (as of 2026).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from gguf_mtp.errors import RequestError
from gguf_mtp.server.dialects.exchange import function_tool, text_of
from gguf_mtp.server.field_tables import Neutral, refused
from gguf_mtp.server.schemas import MAX_MESSAGES, MAX_TOOLS, Body, ChatRequest

__all__ = ["ResponsesRequest", "chat_request", "input_messages", "messages_of"]

NOT_BUILT: Neutral = {
    "background": (False,),
    "conversation": (),
    "max_tool_calls": (),
    "prompt": (),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""Fields that ask for another answer, and the values that do not."""
_TEXT = ("input_text", "output_text", "text")


class ResponsesTool(Body):
    """A function. Tools of another `type` run on OpenAI's own servers."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenTool(Body):
    type: Literal["function"]
    name: str


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    format: TextFormat | None = None


class ReasoningOptions(Body):
    effort: str | None = None


class ResponsesStreamOptions(Body):
    include_obfuscation: bool | None = None


class ResponsesRequest(Body):
    """`POST /v1/responses`."""

    model: str | None = None
    input: str | Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES)] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: Annotated[list[ResponsesTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, str] | None = None


def chat_request(body: ResponsesRequest, messages: Sequence[dict[str, Any]]) -> ChatRequest:
    """The same with `messages`, as a chat request. Raises `RequestError` for what this server
    cannot do."""
    name = refused(body.model_extra or {}, (NOT_BUILT,))
    if name is not None:
        raise RequestError(f"{name} is not supported; omit it")
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": [*system, *messages],
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "stream": body.stream,
        "parallel_tool_calls": body.parallel_tool_calls,
        "tool_choice": body.tool_choice,
    }
    if body.tools:
        fields["tools"] = [_tool(tool, i) for i, tool in enumerate(body.tools)]
    if isinstance(body.tool_choice, ChosenTool):
        fields["tool_choice"] = {"type": "function", "function": {"name": body.tool_choice.name}}
    effort = body.reasoning.effort if body.reasoning else None
    if effort is not None:
        fields |= {"reasoning_effort": effort, "thinking": effort != "none"}
    form = body.text.format if body.text else None
    if form is not None:
        fields["response_format"] = {"type": form.type}
        if form.type == "json_schema":
            schema = {"name": form.name, "schema": form.schema_, "strict": form.strict}
            fields["response_format"]["json_schema"] = schema
    return ChatRequest.model_validate(fields)


def input_messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    """The input as chat messages. Raises `RequestError`."""
    if isinstance(body.input, str):
        return [{"role": "user", "content": body.input}]
    return messages_of(body.input or [], "input")


def messages_of(items: Sequence[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """Items as chat messages. What one turn said comes as several: reasoning, text and calls that
    follow one another are one message. Raises `RequestError`."""
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        _add(messages, item, f"{where}[{i}]")
    return messages


def _add(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    kind = item.get("type", "message" if "role" in item else None)
    if kind == "message":
        content = item.get("content")
        message = {"role": item.get("role"), "content": text_of(content, f"{where}.content", _TEXT)}
        if message["role"] == "assistant":
            _of_assistant(messages)["content"] += message["content"]
        else:
            messages.append(message)
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments", "")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        _of_assistant(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        text = text_of(item.get("output"), f"{where}.output", _TEXT)
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
    elif kind == "reasoning":
        parts = item.get("content") or []
        text = "\n".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
        if text:
            _of_assistant(messages)["reasoning_content"] = text
    else:
        raise RequestError(f"{where} is of type {kind!r}, which this server does not support")


def _of_assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message at the end, begun where there is none."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _tool(tool: ResponsesTool, i: int) -> dict[str, Any]:
    if tool.type != "function" or tool.name is None:
        raise RequestError(
            f"tools[{i}] is of type {tool.type!r}, which this server does not support: only "
            "functions with a name"
        )
    return function_tool(tool.name, tool.description, tool.parameters, tool.strict)
