"""Tool calls in the text of DeepSeek's models: reading them as they come, asking for them, and the
words that tell a model about its tools.

V3 and R1 write `function<sep>NAME`, a fenced block of JSON; V3.1 writes `NAME<sep>JSON` (sglang
#9446). Knows neither tokens nor templates nor HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from gguf_mtp.chat.markers import Found, Seeker

__all__ = ["V3", "V31", "CallArguments", "CallStart", "Content", "ToolCallParser", "ToolFormat"]

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
OUTPUTS, OUTPUT = "<｜tool▁outputs▁begin｜>", "<｜tool▁output▁begin｜>"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes a call: what stands before the tool's name, between it and the
    arguments, and behind them; `between` stands between two calls. `markers` are the texts that may
    be tokens of their own."""

    before_name: str
    after_name: str
    after_arguments: str
    between: str = ""
    markers: tuple[str, ...] = (CALLS, CALL, SEP, CALL_END, CALLS_END, OUTPUTS, OUTPUT)

    def opening(self, name: str | None) -> str:
        """The beginning of an answer that calls the tool `name`; any tool without one."""
        start = f"{CALLS}{CALL}{self.before_name}"
        return start if name is None else f"{start}{name}{self.after_name}"

    def instructions(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """What a system prompt says about `tools` (functions as in an OpenAI request), for
        templates that say nothing."""
        parts = ["## Tools\n\nYou may call these functions:"]
        for tool in tools:
            function = tool["function"]
            parts.append(
                f"### {function['name']}\n"
                f"Description: {function.get('description') or 'none'}\n\n"
                f"Parameters: {json.dumps(function.get('parameters') or {}, ensure_ascii=False)}"
            )
        call = f"{CALL}{self.before_name}NAME{self.after_name}ARGUMENTS{self.after_arguments}"
        parts.append(
            "To call functions, write exactly this, with one block from "
            f"{CALL} to {CALL_END} for each call:\n{CALLS}{call}{CALLS_END}\n"
            "NAME is the name of a function above, ARGUMENTS a JSON object that follows its "
            "Parameters."
        )
        return "\n\n".join(parts)

    def parser(self, max_calls: int | None) -> ToolCallParser:
        return ToolCallParser(max_calls)


V3 = ToolFormat(f"function{SEP}", "\n```json\n", f"\n```{CALL_END}", "\n")
"""DeepSeek V3 and R1."""
V31 = ToolFormat("", SEP, CALL_END)
"""DeepSeek V3.1."""


class Content(NamedTuple):
    """Text outside of calls."""

    text: str


class CallStart(NamedTuple):
    """Call `number` (from 0) of the answer begins."""

    number: int
    name: str


class CallArguments(NamedTuple):
    """More of the arguments of call `number`, in JSON."""

    number: int
    text: str


Event = Content | CallStart | CallArguments


_State = Literal["content", "between", "head", "arguments", "nameless"]


def say(text: str, events: list[Event]) -> str:
    """Puts `text` out as content, but for its last whitespace: calls that follow drop that."""
    shown = text.rstrip()
    if shown:
        events.append(Content(shown))
    return text[len(shown) :]


class ToolCallParser:
    """Reads both formats from a text that comes in pieces.

    A call's name comes first, then its arguments as far as they are certain; arguments end with
    their JSON object, whatever fence follows. Whitespace between content and calls is dropped.
    `is_done` once nothing more is wanted: the calls have ended, `max_calls` were made, or the model
    begins to write the tools' outputs itself.
    """

    def __init__(self, max_calls: int | None = None) -> None:
        self.is_done = False
        self.n_calls = 0
        self._max_calls = max_calls
        self._state: _State = "content"
        self._seeker = Seeker(CALLS, CALL)
        self._held = ""  # content: whitespace that may be dropped; head: what came of it
        self._object = _Object()

    def add(self, text: str) -> list[Event]:
        """What became certain with `text`."""
        events: list[Event] = []
        while text and not self.is_done:
            found = self._seeker.add(text)
            if self._state == "content":
                self._held = say(self._held + found.before, events)
            elif self._state == "head":
                self._read_head(found, events)
            elif self._state == "arguments":
                self._argue(found.before, events)
            text = found.after
            if found.marker is not None:
                self._go_on(found.marker)
        return events

    def finish(self) -> list[Event]:
        """What was held back at the end of the text."""
        events: list[Event] = []
        held = "" if self.is_done else self._seeker.finish()
        if self._state == "content" and self._held + held:
            events.append(Content(self._held + held))
        elif self._state == "head":
            self._start(_name(self._held + held), events)
        elif self._state == "arguments":
            self._argue(held, events)
        self.is_done = True
        return events

    def _read_head(self, found: Found, events: list[Event]) -> None:
        """Up to the brace that opens the arguments, or to the call's end when it has none."""
        self._held += found.before
        separator = self._held.find(SEP)
        brace = self._held.find("{", separator) if separator >= 0 else -1
        if brace >= 0:
            if self._start(_name(self._held[:brace]), events):
                self._state, self._object = "arguments", _Object()
                self._argue(self._held[brace:], events)
            else:
                self._state = "nameless"
        elif found.marker is not None and self._start(_name(self._held), events):
            events.append(CallArguments(self.n_calls - 1, "{}"))

    def _start(self, name: str, events: list[Event]) -> bool:
        """A call without a name is none."""
        if name:
            events.append(CallStart(self.n_calls, name))
            self.n_calls += 1
        return bool(name)

    def _argue(self, text: str, events: list[Event]) -> None:
        if part := self._object.take(text):
            events.append(CallArguments(self.n_calls - 1, part))

    def _go_on(self, marker: str) -> None:
        """What is read next, after `marker`."""
        if marker == CALL:
            self._state, self._seeker, self._held = "head", Seeker(CALL_END, CALLS_END), ""
            return
        self.is_done = marker not in (CALLS, CALL_END) or self.n_calls == self._max_calls
        self._state = "between"
        self._seeker = Seeker(CALL, CALLS_END, OUTPUTS, OUTPUT)


class _Object:
    """Where a JSON object ends, from its braces and strings."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_string = self._is_escaped = self._is_whole = False

    def take(self, text: str) -> str:
        """The part of `text` that belongs to the object."""
        if self._is_whole:
            return ""
        for i, char in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_string:
                self._is_escaped = char == "\\"
                self._is_string = char != '"'
            elif char == '"':
                self._is_string = True
            elif char in "{}":
                self._depth += 1 if char == "{" else -1
                if self._depth == 0:
                    self._is_whole = True
                    return text[: i + 1]
        return text


def _name(head: str) -> str:
    """The tool's name, from what stands before its arguments in either format."""
    before, _, after = head.partition(SEP)
    lines = after.split("\n", 1)  # V3: a fence follows the name; V3.1: nothing but whitespace
    return lines[0].strip() or before.strip()
