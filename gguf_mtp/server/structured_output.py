"""From what a request says of its answer's form to the grammar that makes it so.

OpenAI's `response_format` and `tool_choice`, llama-server's `json_schema` and `grammar`, vLLM's
`guided_*` and `structured_outputs`. Knows neither HTTP nor sampling.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from gguf_mtp.chat.tool_calls import CALL, CALLS, CALLS_END, ToolFormat
from gguf_mtp.errors import RequestError
from gguf_mtp.grammar.gbnf.lark import lark_of
from gguf_mtp.grammar.json_schema import ANY_OBJECT, compile_schema, json_rule
from gguf_mtp.grammar.matching import Grammar, Grammars, quoted
from gguf_mtp.server.schemas import Generation, ResponseFormat, Tool

__all__ = ["Calls", "OutputFormat", "call_grammar", "format_grammar", "output_format_of"]


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

    format: ToolFormat
    tools: Sequence[Tool]
    has_begun: bool = True
    name: str | None = None
    is_single: bool = False

    @property
    def is_strict(self) -> bool:
        """Whether any tool's parameters are promised to be followed."""
        return any(tool.function.strict is True for tool in self.tools)

    def openings(self, grammars: Grammars) -> frozenset[int]:
        """The tokens with which calls begin; none where they are no tokens of their own."""
        ids = map(grammars.token, (CALLS, CALL))
        return frozenset(id_ for id_ in ids if id_ is not None)


def output_format_of(request: Generation, grammars: Grammars) -> OutputFormat | None:
    """Raises `RequestError` for a field that makes no sense, and for two that each ask for one."""
    forms = list(_forms(request, grammars))
    if len(forms) > 1:
        raise RequestError(
            f"{forms[0].field} and {forms[1].field} cannot be combined; give only one"
        )
    return forms[0] if forms else None


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
    rules, heads = [], []
    for i, tool in enumerate(calls.tools):
        if calls.name in (None, tool.function.name):
            rules.append(f"call_{i}: {_arguments(grammars, i, tool, calls)}")
            heads.append(f"call_{i}")
    any_call = f"({' | '.join(heads)})"
    fmt = calls.format
    next_head = _spelled(grammars, fmt, fmt.between + CALL + fmt.before_name)
    more = "" if calls.is_single else f" ({next_head} {any_call})*"
    body = f"{any_call}{more} {grammars.marker(CALLS_END)}"
    if not calls.has_begun:
        head = _spelled(grammars, fmt, CALL + fmt.before_name)
        body = f"{grammars.marker(CALLS)}? {head} {body}"  # some models leave the first one out
    start = f"start: {body}"
    if otherwise is not None:
        start += f" | {json_rule(otherwise.source, otherwise.lenient)}"
    return grammars.compile("\n".join([start, *rules]))


def _forms(request: Generation, grammars: Grammars) -> Iterator[OutputFormat]:
    yield from _response_format(request.response_format)
    if request.json_schema not in (None, {}):
        yield OutputFormat("json_schema", "json", request.json_schema)
    for field in ("grammar", "guided_grammar"):
        if source := getattr(request, field):
            yield _grammar(field, source, grammars)
    if request.guided_json is not None:
        yield _json("guided_json", request.guided_json)
    if request.guided_regex is not None:
        yield _regex("guided_regex", request.guided_regex)
    if request.guided_choice is not None:
        yield _choice("guided_choice", request.guided_choice)
    outputs = request.structured_outputs
    if outputs is not None:
        name = "structured_outputs"
        if outputs.json_ is not None:
            yield _json(f"{name}.json", outputs.json_)
        if outputs.json_object:
            yield OutputFormat(f"{name}.json_object", "json", ANY_OBJECT)
        if outputs.regex is not None:
            yield _regex(f"{name}.regex", outputs.regex)
        if outputs.choice is not None:
            yield _choice(f"{name}.choice", outputs.choice)
        if outputs.grammar:
            yield _grammar(f"{name}.grammar", outputs.grammar, grammars)


def _response_format(asked: ResponseFormat | None) -> Iterator[OutputFormat]:
    field = "response_format"
    if asked is None or asked.type == "text":
        return
    if asked.type == "json_object":
        yield OutputFormat(field, "json", ANY_OBJECT if asked.schema_ is None else asked.schema_)
        return
    inner = asked.json_schema
    schema = asked.schema_ if inner is None else inner.schema_
    if schema is None:
        raise RequestError(f"{field} is of type json_schema, but json_schema.schema is missing")
    yield OutputFormat(
        f"{field}.json_schema.schema", "json", schema, bool(inner and inner.strict is False)
    )


def _json(field: str, schema: Any) -> OutputFormat:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise RequestError(f"{field} is a string that is not valid JSON") from None
    return OutputFormat(field, "json", schema)


def _grammar(field: str, source: str, grammars: Grammars) -> OutputFormat:
    try:
        return OutputFormat(field, "lark", lark_of(source, grammars.token))
    except RequestError as error:
        raise RequestError(f"{field}: {error}") from None


def _regex(field: str, regex: str) -> OutputFormat:
    # A slash would end it, a line break is none of Lark's.
    escaped = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", regex).replace("\n", r"\n")
    return OutputFormat(field, "lark", f"start: /{escaped}/")


def _choice(field: str, choices: Sequence[str]) -> OutputFormat:
    # As one terminal, so that none is cut short by another that it begins with.
    return OutputFormat(field, "lark", f"start: CHOICE\nCHOICE: {' | '.join(map(quoted, choices))}")


def _arguments(grammars: Grammars, index: int, tool: Tool, calls: Calls) -> str:
    """Lark for what follows the beginning of a call: the name, where it is open, and the rest."""
    function = tool.function
    schema = dict(function.parameters or {})
    if schema.setdefault("type", "object") != "object":
        field = f"tools[{index}].function.parameters"
        raise RequestError(f"{field} are of type {schema['type']!r}, but must be an object")
    lenient = function.strict is not True
    try:
        compile_schema(grammars, schema, lenient)
    except RequestError as error:
        raise RequestError(f"tools[{index}].function.parameters: {error}") from None
    head = "" if calls.name is not None else function.name + calls.format.after_name
    parts = (
        _spelled(grammars, calls.format, head),
        json_rule(schema, lenient),
        _spelled(grammars, calls.format, calls.format.after_arguments),
    )
    return " ".join(part for part in parts if part)


def _spelled(grammars: Grammars, fmt: ToolFormat, text: str) -> str:
    """Lark for `text`, its markers as the tokens they are."""
    pieces = re.split(f"({'|'.join(map(re.escape, fmt.markers))})", text)
    return " ".join(
        grammars.marker(piece) if piece in fmt.markers else quoted(piece)
        for piece in pieces
        if piece
    )
