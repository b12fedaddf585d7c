"""JSON schemas as grammars, and where in a schema the trouble lies when it makes none.

What is enforced is what llguidance enforces (its `docs/json_schema.md`): properties come in the
schema's order, and of JSON's white space as much as a pretty printer needs. A keyword that cannot
be enforced is an error, or with `lenient` ignored.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gguf_mtp.errors import RequestError
from gguf_mtp.grammar.matching import Grammar, Grammars

__all__ = [
    "ANY_OBJECT",
    "ONE_SCHEMA",
    "SCHEMA_LISTS",
    "SCHEMA_MAPS",
    "compile_schema",
    "json_rule",
    "subschemas",
]

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}

MAX_DEPTH = 64
"""Of a schema's own nesting; what its `$ref`s make of it may be as deep as it likes."""
MAX_TRIED, TRIAL_CHARS = 2 << 20, 5_000
"""Characters of a schema's parts that are tried to find the one at fault; a trial of the smallest
part takes as long as so many of a larger one."""

_WHITE_SPACE = r" |\n{1,2}[ \t]{0,20}"
"""llama.cpp's bound (`json-schema-to-grammar.cpp`): without one a sampled answer may be all space,
while a pretty printer's lines stay possible."""
_OWN_PLACE = re.compile(r"^line \d+, column \d+: failed to compile JSON schema: ")
"""Of the one line that a schema becomes."""
ONE_SCHEMA = (
    "items", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else",
)  # fmt: skip
SCHEMA_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords with a schema, with a list of them, with schemas by name."""


def json_rule(schema: Any, lenient: bool = False) -> str:
    """Lark for JSON that follows `schema`, to be put where a rule's name may stand."""
    options = {"whitespace_pattern": _WHITE_SPACE, "lenient": lenient}
    if isinstance(schema, Mapping):
        whole = {k: v for k, v in schema.items() if k != "x-guidance"} | {"x-guidance": options}
    else:
        whole = {"x-guidance": options, "allOf": [schema]}
    return f"%json {json.dumps(whole)}"


def compile_schema(grammars: Grammars, schema: Any, lenient: bool = False) -> Grammar:
    """A grammar of the JSON that follows `schema`.

    Raises `RequestError` that begins with a JSON pointer to the part that cannot be enforced.
    """
    _check_shape(schema)
    try:
        return _compile(grammars, schema, lenient)
    except RequestError as error:
        place, reason = _locate(grammars, schema, lenient, str(error))
    raise RequestError(f"at {place}: {reason}")


def _compile(grammars: Grammars, schema: Any, lenient: bool) -> Grammar:
    try:
        return grammars.compile(f"start: {json_rule(schema, lenient)}")
    except RequestError as error:
        raise RequestError(_OWN_PLACE.sub("", str(error))) from None


def _check_shape(schema: Any) -> None:
    """Raises `RequestError` for a schema that is none, or is nested too deeply to be looked at."""
    if not isinstance(schema, Mapping | bool):
        raise RequestError("at the root: a schema must be an object, true or false")
    level: list[tuple[str, Any]] = [("", schema)]
    for _ in range(MAX_DEPTH):
        for place, value in level:
            if isinstance(value, float) and not math.isfinite(value):
                raise RequestError(f"at {place}: {value} is not a valid JSON number")
        level = [child for place, value in level for child in _inside(place, value)]
        if not level:
            return
    raise RequestError(f"at {level[0][0]}: it is nested deeper than {MAX_DEPTH} levels")


def _locate(grammars: Grammars, schema: Any, lenient: bool, reason: str) -> tuple[str, str]:
    """The innermost part of `schema` that fails by itself, as a JSON pointer, and its reason."""
    definitions = {
        key: schema[key]
        for key in ("$defs", "definitions")
        if isinstance(schema, Mapping) and key in schema
    }
    place, part, n_left = "", schema, MAX_TRIED
    while True:
        for child_place, child in subschemas(place, part):
            whole = {**definitions, **child} if isinstance(child, Mapping) else child
            n_left -= len(json_rule(whole)) + TRIAL_CHARS
            if n_left < 0:
                return place or "the root", reason
            try:
                _compile(grammars, whole, lenient)
            except RequestError as error:
                # A reference that only resolves in the whole schema is not what is wrong with it.
                if str(error) != reason and "does not exist" in str(error):
                    continue
                place, part, reason = child_place, child, str(error)
                break
        else:
            return place or "the root", reason


def subschemas(place: str, schema: Any) -> Iterator[tuple[str, Any]]:
    """The schemas directly inside `schema`, with their pointers."""
    if not isinstance(schema, Mapping):
        return
    for key, value in schema.items():
        if key in ONE_SCHEMA or (key in SCHEMA_LISTS and isinstance(value, Sequence)):
            inner = [(f"{place}/{key}", value)]
            yield from _inside(*inner[0]) if key in SCHEMA_LISTS else inner
        elif key in SCHEMA_MAPS and isinstance(value, Mapping):
            yield from _inside(f"{place}/{key}", value)


def _inside(place: str, value: Any) -> list[tuple[str, Any]]:
    """What an object or a list holds, with its pointers."""
    if isinstance(value, Mapping):
        return [(f"{place}/{_escape(key)}", inner) for key, inner in value.items()]
    if isinstance(value, list):
        return [(f"{place}/{i}", inner) for i, inner in enumerate(value)]
    return []


def _escape(key: str) -> str:
    """RFC 6901."""
    return key.replace("~", "~0").replace("/", "~1")
