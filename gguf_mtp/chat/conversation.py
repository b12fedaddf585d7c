"""An OpenAI conversation in the shape that a model's chat template understands.

Templates differ in what they expect and in what they drop without a word: arguments as text (V3,
R1) or as objects (V3.1), text next to tool calls (dropped by V3), tools (DeepSeek's templates have
none). `ChatTemplate` finds out once, by rendering needles and looking for them. Knows neither
tokens nor HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic_core import from_json

from gguf_mtp.chat import reasoning, tool_calls
from gguf_mtp.chat import template as chat
from gguf_mtp.chat.dsml import DSML, Dsml
from gguf_mtp.chat.tool_calls import ToolFormat
from gguf_mtp.errors import RequestError

__all__ = ["CallFormat", "ChatPrompt", "ChatTemplate", "Turns"]

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Turns:
    """A conversation and how to render it.

    `messages` have string content (None beside tool calls) and tool calls whose arguments are text.
    `tools` are functions as in an OpenAI request. `must_call`: the answer begins with a call, of
    the tool `call_name` if given. `continues`: the answer goes on with the last message, which is
    the assistant's. `variables` go to the template.
    """

    messages: Sequence[Message]
    tools: Sequence[Message] = ()
    must_call: bool = False
    call_name: str | None = None
    continues: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)


class ChatPrompt(NamedTuple):
    """`text` ends with `begun`, the part of the answer that the prompt takes out of the model's
    hands; `has_bos` as in `template.Prompt`. The answer begins in reasoning if `thinks`."""

    text: str
    has_bos: bool
    begun: str
    thinks: bool


class ChatTemplate:
    """A chat template with what it can express."""

    def __init__(self, source: str | None, bos: str, eos: str) -> None:
        self._source, self._bos, self._eos = source, bos, eos
        text = source or ""
        self.can_think = reasoning.CLOSE in text
        self.tool_format = _tool_format(text)
        self.has_switch = "thinking" in text
        self._knows_developer = "developer" in text
        self._shows_tools = "needle_tool" in self._try([_ask()], tools=[_tool("needle_tool")])
        self._empty, self._takes_objects, self._shows_calls = self._find_calls()
        after_call = [_ask(), self._arguments(_call(self._empty)), _result()]
        self._shows_results = any(
            "needle_result" in self._try(messages, tools)
            for messages in (after_call, [_ask(), _result()])
            for tools in (None, [_tool("needle_call")])
        )
        beside = self._try([_ask(), self._arguments(_call("needle_text"))])
        self._keeps_text = "needle_text" in beside and "needle_call" in beside

    def prompt(self, turns: Turns) -> ChatPrompt:
        """Ready for the assistant's answer.

        Raises `RequestError` when the template refuses, or would drop a part of the conversation.
        """
        messages = [piece for message in turns.messages for piece in self._fit(message)]
        tools = list(turns.tools)
        if tools:
            format_ = self._format()  # calls that could not be read would come as text
            if not self._shows_tools:
                messages = _instruct(messages, format_.instructions(tools))
        if turns.continues:
            messages = _marked(messages)
        options = chat.TemplateOptions(
            add_generation_prompt=not turns.continues,
            tools=tools or None,
            extra=turns.variables,
        )
        text, has_bos = chat.render(self._source, messages, self._bos, self._eos, options)
        if turns.continues:
            text = _before_mark(text)
        thinks = self.can_think and reasoning.is_open(text)
        if not turns.must_call:
            return ChatPrompt(text, has_bos, "", thinks)
        begun = self._format().opening(turns.call_name)
        closed = reasoning.CLOSE if thinks else ""
        return ChatPrompt(text + closed + begun, has_bos, begun, False)

    def _find_calls(self) -> tuple[str | None, bool, bool]:
        """What stands for no content beside calls, whether arguments are objects, and whether calls
        are shown at all."""
        written = '{"needle_a": 1}'
        for tools in (None, [_tool("needle_call")]):  # some templates fail without tools
            for empty in ("", None):  # many templates print None as a word
                if written in self._try([_ask(), _call(empty, written)], tools):
                    return empty, False, True
                if "needle_a" in self._try([_ask(), _call(empty, json.loads(written))], tools):
                    return empty, True, True
        return None, False, False

    def _fit(self, message: Message) -> list[Message]:
        """The message as the template reads it; two where one would lose its text."""
        role = message["role"]
        if role == "developer" and not self._knows_developer:
            return [dict(message) | {"role": "system"}]
        if role == "tool" and not self._shows_results:
            raise RequestError("the model's chat template does not support tool results")
        if role != "assistant" or not message.get("tool_calls"):
            return [message]
        if not self._shows_calls:
            raise RequestError("the model's chat template does not support tool calls")
        message = self._arguments(message)
        alone = dict(message) | {"content": self._empty}
        if not message["content"]:
            return [alone]
        if self._keeps_text:
            return [message]
        return [{"role": role, "content": message["content"]}, alone]

    def _arguments(self, message: Message) -> Message:
        """The message with its calls' arguments as objects, where the template wants that."""
        if not self._takes_objects:
            return message
        calls = []
        for call in message["tool_calls"]:
            function = dict(call["function"])
            try:  # a call that was cut is shown as far as it came
                text = function["arguments"] or "{}"
                function["arguments"] = from_json(text, allow_partial="trailing-strings")
            except ValueError:
                raise RequestError(
                    f"the arguments of the call to {function['name']} are not JSON, "
                    "but the model's chat template needs JSON"
                ) from None
            calls.append(dict(call) | {"function": function})
        return dict(message) | {"tool_calls": calls}

    def _format(self) -> CallFormat:
        if self.tool_format is None:
            raise RequestError("tools: this model's tool call format is not supported")
        return self.tool_format

    def _try(self, messages: Sequence[Message], tools: Sequence[Message] | None = None) -> str:
        """The rendered messages; nothing when the template does not take them."""
        options = chat.TemplateOptions(add_generation_prompt=False, tools=tools)
        try:
            return chat.render(self._source, messages, self._bos, self._eos, options).text
        except RequestError:
            return ""


CallFormat = ToolFormat | Dsml


def _tool_format(template: str) -> CallFormat | None:
    if DSML in template:
        return Dsml("function_calls") if "function_calls" in template else Dsml()
    if tool_calls.CALLS not in template:
        return None
    return tool_calls.V3 if "```json" in template else tool_calls.V31


def _instruct(messages: Sequence[Message], text: str) -> list[Message]:
    """The messages with `text` at the end of the first system message, or as one of its own."""
    if messages and messages[0]["role"] == "system":
        system = dict(messages[0]) | {"content": f"{messages[0]['content']}\n\n{text}"}
        return [system, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


_ID = "needle000"
"""Of a call; Mistral's templates refuse any but nine letters and digits."""
_MARK = "needle-of-the-end-6f1c"


def _marked(messages: Sequence[Message]) -> list[Message]:
    """The messages with a mark at the end of the last one, which is the assistant's text."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or not last.get("content") or last.get("tool_calls"):
        raise RequestError(
            "continue_final_message needs a last message of the assistant with a text"
        )
    return [*messages[:-1], dict(last) | {"content": f"{last['content']}{_MARK}"}]


def _before_mark(text: str) -> str:
    """The prompt up to the mark: what would close the message is left out."""
    before, mark, _ = text.rpartition(_MARK)
    if not mark:
        raise RequestError("the model's chat template does not show the message to continue")
    return before


def _ask() -> Message:
    return {"role": "user", "content": "needle_question"}


def _tool(name: str) -> Message:
    function = {"name": name, "description": "", "parameters": {"type": "object", "properties": {}}}
    return {"type": "function", "function": function}


def _call(content: str | None, arguments: str | Mapping[str, int] = "{}") -> Message:
    function = {"name": "needle_call", "arguments": arguments}
    call = {"id": _ID, "type": "function", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def _result() -> Message:
    return {"role": "tool", "tool_call_id": _ID, "content": "needle_result"}
