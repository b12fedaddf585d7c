"""Tool calls in DSML, as DeepSeek-V4 writes them: reading them as they come, and asking for them.

    <｜DSML｜tool_calls>
    <｜DSML｜invoke name="NAME">
    <｜DSML｜parameter name="KEY" string="true">TEXT</｜DSML｜parameter>
    <｜DSML｜parameter name="KEY" string="false">JSON</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜tool_calls>

DeepSeek-V3.2 calls the block `function_calls`. Arguments come out as JSON, like those of every
other format. Knows neither tokens nor templates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gguf_mtp.chat.markers import Seeker
from gguf_mtp.chat.tool_calls import CallArguments, CallStart, Content, Event, say

__all__ = ["DSML", "Dsml", "DsmlParser"]

DSML = "｜DSML｜"
CALL, CALL_END = f'<{DSML}invoke name="', f"</{DSML}invoke>"
PARAMETER, PARAMETER_END = f'<{DSML}parameter name="', f"</{DSML}parameter>"


@dataclass(frozen=True, slots=True)
class Dsml:
    """The format, with what `tool_calls.ToolFormat` has. `block` is what calls stand in."""

    block: str = "tool_calls"
    markers: tuple[str, ...] = (DSML,)

    @property
    def calls(self) -> str:
        """The tag that begins them."""
        return f"<{DSML}{self.block}>"

    @property
    def calls_end(self) -> str:
        return f"</{DSML}{self.block}>"

    def opening(self, name: str | None) -> str:
        """The beginning of an answer that calls the tool `name`; any tool without one."""
        start = f"\n\n{self.calls}\n{CALL}"
        return start if name is None else f'{start}{name}">\n'

    def instructions(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """What a system prompt says about `tools`, for templates that say nothing."""
        listed = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
        call = (
            f'{self.calls}\n{CALL}NAME">\n'
            f'{PARAMETER}KEY" string="true|false">VALUE{PARAMETER_END}\n'
            f"{CALL_END}\n{self.calls_end}"
        )
        return (
            "## Tools\n\nYou may call these functions, written exactly like this:\n"
            f'{call}\nVALUE is text where string="true", JSON otherwise.\n\n' + "\n".join(listed)
        )

    def parser(self, max_calls: int | None) -> DsmlParser:
        return DsmlParser(max_calls, self)


_State = Literal["content", "calls", "call", "value"]
_TAG = re.compile(rf'<(/?){DSML}(\w+)((?:[^>"]|"[^"]*")*)>')
_NAME = re.compile(r'\bname="([^"]*)"')
_IS_TEXT = re.compile(r'\bstring="true"')


class DsmlParser:
    """Reads calls from a text that comes in pieces, as `tool_calls.ToolCallParser` does."""

    def __init__(self, max_calls: int | None = None, fmt: Dsml = Dsml()) -> None:
        self.is_done = False
        self.n_calls = 0
        self._max_calls = max_calls
        self._state: _State = "content"
        self._block = fmt.block
        self._seeker = Seeker(fmt.calls)
        self._held = ""  # content: whitespace that may be dropped; then text before a whole tag
        self._n_arguments = 0
        self._is_text, self._is_empty = False, True  # of the argument that is being read

    def add(self, text: str) -> list[Event]:
        """What became certain with `text`."""
        events: list[Event] = []
        while text and not self.is_done:
            text = self._take(text, events)
        return events

    def finish(self) -> list[Event]:
        """What was held back at the end of the text."""
        events: list[Event] = []
        if not self.is_done and self._state == "content":
            if held := self._held + self._seeker.finish():
                events.append(Content(held))
        elif not self.is_done and self._state == "value":
            self._value(self._seeker.finish(), events)
        self.is_done = True
        return events

    def _take(self, text: str, events: list[Event]) -> str:
        """Reads up to the next change of state; what is left."""
        if self._state in ("calls", "call"):
            return self._tag(text, events)
        found = self._seeker.add(text)
        if self._state == "content":
            self._held = say(self._held + found.before, events)
        else:
            self._value(found.before, events)
        if found.marker is None:
            return ""
        if self._state == "value":
            self._argue('"' if self._is_text else "null" if self._is_empty else "", events)
        self._state, self._held = "call" if self._state == "value" else "calls", ""
        return found.after

    def _tag(self, text: str, events: list[Event]) -> str:
        self._held += text
        tag = _TAG.search(self._held)
        if tag is None:
            return ""
        rest, self._held = self._held[tag.end() :], ""
        is_end, name = bool(tag[1]), tag[2]
        is_calls_end = is_end and name == self._block
        if self._state == "call" and (is_calls_end or name == "invoke"):
            # A model that nothing binds may leave the call's own end out.
            self._argue("}" if self._n_arguments else "{}", events)
            self._state = "calls"
            self.is_done = self.n_calls == self._max_calls
        if is_calls_end:
            self.is_done = True
        elif not is_end and name == "invoke" and not self.is_done:
            self._begin(tag[3], events)
        elif not is_end and name == "parameter" and self._state == "call":
            self._parameter(tag[3], events)
        return rest

    def _begin(self, attributes: str, events: list[Event]) -> None:
        """A call without a name is none."""
        name = _NAME.search(attributes)
        if name and name[1]:
            events.append(CallStart(self.n_calls, name[1]))
            self.n_calls += 1
            self._state, self._n_arguments = "call", 0

    def _parameter(self, attributes: str, events: list[Event]) -> None:
        key = _NAME.search(attributes)
        self._is_text, self._is_empty = bool(_IS_TEXT.search(attributes)), True
        before = ", " if self._n_arguments else "{"
        name = json.dumps(key[1] if key else "", ensure_ascii=False)
        quote = '"' if self._is_text else ""
        self._argue(f"{before}{name}: {quote}", events)
        self._n_arguments += 1
        self._state, self._seeker = "value", Seeker(PARAMETER_END)

    def _value(self, text: str, events: list[Event]) -> None:
        self._is_empty = self._is_empty and not text.strip()
        self._argue(json.dumps(text, ensure_ascii=False)[1:-1] if self._is_text else text, events)

    def _argue(self, text: str, events: list[Event]) -> None:
        if text:
            events.append(CallArguments(self.n_calls - 1, text))
