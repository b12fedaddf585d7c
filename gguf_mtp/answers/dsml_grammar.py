"""A grammar for calls in DSML (`chat.dsml`): every argument stands between tags of its own.

Text is written as it is, so what a schema says of it beyond a list of values cannot be enforced:
with `strict` that is an error. Parameters come in the schema's order, like properties in JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gguf_mtp.chat.dsml import CALL, CALL_END, CALLS, CALLS_END, DSML, PARAMETER, PARAMETER_END
from gguf_mtp.errors import RequestError
from gguf_mtp.grammar.json_schema import compile_schema, json_rule
from gguf_mtp.grammar.matching import Grammars, quoted

__all__ = ["TEXT", "call_rule", "calls_rule"]

TEXT = """text: (PLAIN | LESS | CLOSING)*
PLAIN: /[^<]+/
LESS: "<"
CLOSING: /<\\/[^<｜]/"""
"""Whatever holds no `</｜`, which ends an argument."""
_OF_TEXT = frozenset(["minLength", "maxLength", "pattern", "format"])
_NOT_TEXT = frozenset(["number", "integer", "boolean", "array", "object", "null"])


def _spelled(grammars: Grammars, text: str) -> str:
    return grammars.spelled(text, (DSML,))


def calls_rule(grammars: Grammars, heads: list[str], is_single: bool, begins: str) -> str:
    """Lark for calls, one of `heads` each. `begins`: what of the opening is not there yet, "all",
    "tag" (all but the first `<`) or "nothing"."""
    any_call = f"({' | '.join(heads)})"
    next_call = _spelled(grammars, CALL)
    more = "" if is_single else f" ({next_call} {any_call})*"
    body = f"{any_call}{more} {_spelled(grammars, CALLS_END)}"
    opening = {"all": f"\n\n{CALLS}\n{CALL}", "tag": f"{CALLS[1:]}\n{CALL}", "nothing": ""}[begins]
    return f"{_spelled(grammars, opening)} {body}".strip()


def call_rule(grammars: Grammars, index: int, function: Mapping[str, Any], head: str) -> str:
    """Rules for the call of one tool, `call_INDEX` the first: behind `head`, its parameters.

    Raises `RequestError` with the part of the schema that cannot be enforced.
    """
    field = f"tools[{index}].function.parameters"
    schema = dict(function.get("parameters") or {})
    lenient = function.get("strict") is not True
    properties = schema.get("properties") or {}
    if schema.get("type", "object") != "object" or not isinstance(properties, Mapping):
        raise RequestError(f"{field} must be an object with properties")
    try:
        compile_schema(grammars, schema | {"type": "object"}, lenient)
    except RequestError as error:
        raise RequestError(f"{field}: {error}") from None
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    required, rules, parts = schema.get("required") or [], [], []
    for i, (name, part) in enumerate(properties.items()):
        if '"' in name:
            raise RequestError(f"{field}: the property {name!r} cannot be named in DSML")
        whole = {**definitions, **part} if isinstance(part, Mapping) else part
        if not lenient and isinstance(part, Mapping) and _OF_TEXT & part.keys():
            raise RequestError(f"{field}: at /properties/{name}: DSML cannot enforce it")
        forms = " | ".join(_forms(grammars, name, whole, lenient))
        rules.append(f"parameter_{index}_{i}: {forms}")
        parts.append(f"parameter_{index}_{i}" + ("" if name in required else "?"))
    if not properties and lenient:
        rules.append(f"parameter_{index}: {' | '.join(_any(grammars))}")
        parts.append(f"parameter_{index}*")
    end = _spelled(grammars, f"{CALL_END}\n")
    body = " ".join([_spelled(grammars, head) if head else "", *parts, '"\\n"?', end])
    return "\n".join([f"call_{index}: {body.strip()}", *rules])


def _forms(grammars: Grammars, name: str, schema: Any, lenient: bool) -> Iterator[str]:
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    kinds = {kinds} if isinstance(kinds, str) else set(kinds or ())
    values = _values(schema)
    end = _spelled(grammars, f"{PARAMETER_END}\n")
    if values is not None:
        texts = [quoted(value) for value in values if isinstance(value, str)]
        if texts:
            yield f"{_tag(grammars, name, 'true')} ({' | '.join(texts)}) {end}"
        if len(texts) == len(values):
            return
    elif not kinds or "string" in kinds:
        yield f"{_tag(grammars, name, 'true')} text {end}"
    if not kinds or kinds & _NOT_TEXT:
        yield f"{_tag(grammars, name, 'false')} {json_rule(schema, lenient)} {end}"


def _values(schema: Any) -> list[Any] | None:
    """All that a value may be, where the schema lists it."""
    if not isinstance(schema, Mapping):
        return None
    if "const" in schema:
        return [schema["const"]]
    return list(schema["enum"]) if isinstance(schema.get("enum"), list) else None


def _any(grammars: Grammars) -> Iterator[str]:
    start, end = _spelled(grammars, PARAMETER), _spelled(grammars, f"{PARAMETER_END}\n")
    for is_text, value in (("true", "text"), ("false", json_rule(True))):
        rest = quoted(f'" string="{is_text}">')
        yield f'{start} /[^"\\n]+/ {rest} {value} {end}'


def _tag(grammars: Grammars, name: str, is_text: str) -> str:
    return _spelled(grammars, f'{PARAMETER}{name}" string="{is_text}">')
