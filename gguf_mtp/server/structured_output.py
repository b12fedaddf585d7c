"""The fields of a request that say what an answer must look like.

OpenAI's `response_format`, llama-server's `json_schema` and `grammar`, vLLM's `guided_*` and
`structured_outputs`.
"""

from __future__ import annotations

from collections.abc import Iterator

from gguf_mtp.answers.structured_output import (
    ANY_JSON_OBJECT,
    OutputFormat,
    choice_format,
    grammar_format,
    json_format,
    regex_format,
)
from gguf_mtp.errors import RequestError
from gguf_mtp.grammar.matching import Grammars
from gguf_mtp.server.schemas import Generation, ResponseFormat

__all__ = ["output_format_of"]


def output_format_of(request: Generation, grammars: Grammars) -> OutputFormat | None:
    """Raises `RequestError` for a field that makes no sense, and for two that each ask for one."""
    forms = list(_forms(request, grammars))
    if len(forms) > 1:
        raise RequestError(
            f"{forms[0].field} and {forms[1].field} cannot be combined; give only one"
        )
    return forms[0] if forms else None


def _forms(request: Generation, grammars: Grammars) -> Iterator[OutputFormat]:
    yield from _response_format(request.response_format)
    if request.json_schema not in (None, {}):
        yield OutputFormat("json_schema", "json", request.json_schema)
    for field in ("grammar", "guided_grammar"):
        if source := getattr(request, field):
            yield grammar_format(field, source, grammars)
    if request.guided_json is not None:
        yield json_format("guided_json", request.guided_json)
    if request.guided_regex is not None:
        yield regex_format("guided_regex", request.guided_regex)
    if request.guided_choice is not None:
        yield choice_format("guided_choice", request.guided_choice)
    outputs = request.structured_outputs
    if outputs is not None:
        name = "structured_outputs"
        if outputs.json_ is not None:
            yield json_format(f"{name}.json", outputs.json_)
        if outputs.json_object:
            yield OutputFormat(f"{name}.json_object", "json", ANY_JSON_OBJECT)
        if outputs.regex is not None:
            yield regex_format(f"{name}.regex", outputs.regex)
        if outputs.choice is not None:
            yield choice_format(f"{name}.choice", outputs.choice)
        if outputs.grammar:
            yield grammar_format(f"{name}.grammar", outputs.grammar, grammars)


def _response_format(asked: ResponseFormat | None) -> Iterator[OutputFormat]:
    field = "response_format"
    if asked is None or asked.type == "text":
        return
    if asked.type == "json_object":
        yield OutputFormat(
            field, "json", ANY_JSON_OBJECT if asked.schema_ is None else asked.schema_
        )
        return
    inner = asked.json_schema
    schema = asked.schema_ if inner is None else inner.schema_
    if schema is None:
        raise RequestError(f"{field} is of type json_schema, but json_schema.schema is missing")
    yield OutputFormat(
        f"{field}.json_schema.schema", "json", schema, bool(inner and inner.strict is False)
    )
