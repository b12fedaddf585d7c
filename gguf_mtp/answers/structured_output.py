"""What an answer's text must look like: a JSON schema, a grammar, or calls of tools.

Knows neither HTTP nor sampling.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from gguf_mtp.answers import dsml_grammar
from gguf_mtp.chat.conversation import CallFormat
from gguf_mtp.chat.dsml import Dsml
from gguf_mtp.chat.tool_calls import CALL, CALLS, CALLS_END, ToolFormat
from gguf_mtp.errors import RequestError
from gguf_mtp.grammar.gbnf.lark import lark_of
from gguf_mtp.grammar.json_schema import ANY_OBJECT, compile_schema, json_rule
from gguf_mtp.grammar.matching import Grammar, Grammars, quoted

__all__ = [
    "ANY_JSON_OBJECT",
    "Calls",
    "OutputFormat",
    "Tool",
    "call_grammar",
    "choice_format",
    "format_grammar",
    "grammar_format",
    "json_format",
    "regex_format",
]

Tool = Mapping[str, Any]
"""A function as in an OpenAI request: `{"type": "function", "function": {"name": ..., ...}}`."""
ANY_JSON_OBJECT = ANY_OBJECT


class OutputFormat(NamedTuple):
    """What an answer's text must look like, and the request's field that says so.

    `source` is a JSON schema, or a grammar in Lark.
    """

    field: str
    kind: Literal["json", "lark"]
    source: Any
    lenient: bool = False


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls that an answer makes. `has_begun`: the prompt holds their opening, up to the name or,
    with `name`, behind it; otherwise the answer may do without. `is_single`: one call and no more.
    """

    format: CallFormat
    tools: Sequence[Tool]
    has_begun: bool = True
    name: str | None = None
    is_single: bool = False

    @property
    def is_strict(self) -> bool:
        """Whether any tool's parameters are promised to be followed."""
        return any(tool["function"].get("strict") is True for tool in self.tools)

    def openings(self, grammars: Grammars) -> frozenset[int]:
        """The tokens with which calls begin; none where they are no tokens of their own."""
        markers = self.format.markers if isinstance(self.format, Dsml) else (CALLS, CALL)
        ids = map(grammars.token, markers)
        return frozenset(id_ for id_ in ids if id_ is not None)


def json_format(field: str, schema: Any) -> OutputFormat:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise RequestError(f"{field} is a string that is not valid JSON") from None
    return OutputFormat(field, "json", schema)


def grammar_format(field: str, source: str, grammars: Grammars) -> OutputFormat:
    try:
        return OutputFormat(field, "lark", lark_of(source, grammars.token))
    except RequestError as error:
        raise RequestError(f"{field}: {error}") from None


def regex_format(field: str, regex: str) -> OutputFormat:
    # A slash would end it, a line break is none of Lark's.
    escaped = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", regex).replace("\n", r"\n")
    return OutputFormat(field, "lark", f"start: /{escaped}/")


def choice_format(field: str, choices: Sequence[str]) -> OutputFormat:
    # As one terminal, so that none is cut short by another that it begins with.
    return OutputFormat(field, "lark", f"start: CHOICE\nCHOICE: {' | '.join(map(quoted, choices))}")


def format_grammar(grammars: Grammars, form: OutputFormat) -> Grammar:
    """Raises `RequestError` that names the field and the place in it."""
    try:
        if form.kind == "json":
            return compile_schema(grammars, form.source, form.lenient)
        return grammars.compile(form.source)
    except RequestError as error:
        raise RequestError(f"{form.field}: {error}") from None


def call_grammar(
    grammars: Grammars, calls: Calls, otherwise: OutputFormat | None = None
) -> Grammar:
    """Answers that are calls of `calls.tools` with arguments as their parameters say, or
    `otherwise` JSON; what the prompt holds of them is left out.

    Raises `RequestError` that names the tool and the place.
    """
    chosen = [
        (i, tool["function"])
        for i, tool in enumerate(calls.tools)
        if calls.name in (None, tool["function"]["name"])
    ]
    heads = [f"call_{i}" for i, _ in chosen]
    if isinstance(calls.format, Dsml):
        # Calls that a text may end in are bound from their marker on, which follows a `<`.
        begins = "nothing" if calls.has_begun else "all" if otherwise is not None else "tag"
        body = dsml_grammar.calls_rule(grammars, calls.format, heads, calls.is_single, begins)
        rules = [
            dsml_grammar.call_rule(
                grammars, i, function, "" if calls.name is not None else f'{function["name"]}">\n'
            )
            for i, function in chosen
        ]
        rules.append(dsml_grammar.TEXT)
    else:
        body = _calls(grammars, calls, calls.format, heads)
        rules = [
            f"call_{i}: {_arguments(grammars, i, function, calls, calls.format)}"
            for i, function in chosen
        ]
    start = f"start: {body}"
    if otherwise is not None:
        start += f" | {json_rule(otherwise.source, otherwise.lenient)}"
    return grammars.compile("\n".join([start, *rules]))


def _calls(grammars: Grammars, calls: Calls, fmt: ToolFormat, heads: list[str]) -> str:
    """Lark for calls, one of `heads` each."""
    any_call = f"({' | '.join(heads)})"
    next_head = grammars.spelled(fmt.between + CALL + fmt.before_name, fmt.markers)
    more = "" if calls.is_single else f" ({next_head} {any_call})*"
    body = f"{any_call}{more} {grammars.marker(CALLS_END)}"
    if calls.has_begun:
        return body
    head = grammars.spelled(CALL + fmt.before_name, fmt.markers)
    return f"{grammars.marker(CALLS)}? {head} {body}"  # some models leave the first one out


def _arguments(
    grammars: Grammars, index: int, function: Mapping[str, Any], calls: Calls, fmt: ToolFormat
) -> str:
    """Lark for what follows the beginning of a call: the name, where it is open, and the rest."""
    schema = dict(function.get("parameters") or {})
    if schema.setdefault("type", "object") != "object":
        field = f"tools[{index}].function.parameters"
        raise RequestError(f"{field} are of type {schema['type']!r}, but must be an object")
    lenient = function.get("strict") is not True
    try:
        compile_schema(grammars, schema, lenient)
    except RequestError as error:
        raise RequestError(f"tools[{index}].function.parameters: {error}") from None
    head = "" if calls.name is not None else function["name"] + fmt.after_name
    parts = (
        grammars.spelled(head, fmt.markers),
        json_rule(schema, lenient),
        grammars.spelled(fmt.after_arguments, fmt.markers),
    )
    return " ".join(part for part in parts if part)
