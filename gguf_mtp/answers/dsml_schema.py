"""What a tool's JSON schema lets arguments in DSML be: which there are, and which may be text.

In DSML an argument is text as it is, or JSON. So a schema is taken apart here: into the sets of
arguments that it allows, and for each argument into the texts that it admits and whether it admits
anything else. References, `anyOf`, `oneOf` and `allOf` are followed. Knows no grammar.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple
from urllib.parse import unquote

from gguf_mtp.errors import RequestError
from gguf_mtp.grammar.json_schema import ONE_SCHEMA, SCHEMA_LISTS, SCHEMA_MAPS, subschemas

__all__ = ["Arguments", "Texts", "ToolSchema"]

MOST_ALTERNATIVES = 32
_ROOT = "root"
_OF_TEXT = ("minLength", "maxLength", "pattern", "format", "not", "if")
_OF_OBJECTS = (
    "patternProperties", "propertyNames", "minProperties", "maxProperties", "dependentRequired",
    "dependentSchemas", "dependencies", "unevaluatedProperties", "not", "if",
)  # fmt: skip
"""What DSML cannot enforce."""


class Texts(NamedTuple):
    """The texts that a schema admits: any, or `values`, if those are listed. `unbound`: a keyword
    that says more of them."""

    any: bool
    values: tuple[str, ...] = ()
    unbound: str | None = None

    def __bool__(self) -> bool:
        return self.any or bool(self.values)

    def both(self, other: Texts) -> Texts:
        """What both admit."""
        unbound = self.unbound or other.unbound
        if self.any and other.any:
            return Texts(True, (), unbound)
        if self.any or other.any:
            return Texts(False, other.values if self.any else self.values, unbound)
        return Texts(False, tuple(v for v in self.values if v in other.values), unbound)

    def either(self, other: Texts) -> Texts:
        """What one of them admits."""
        found = [one for one in (self, other) if one]
        unbound = next((one.unbound for one in found if one.unbound), None)
        if any(one.any for one in found):
            return Texts(True, (), unbound)
        return Texts(False, tuple(dict.fromkeys(self.values + other.values)), unbound)


ALL, NONE = Texts(True), Texts(False)


class Arguments(NamedTuple):
    """One set of arguments: `named` maps names to schemas, in order, of which `required` must be
    there. `more`: the schema of others, False without any, None where nothing is said of them."""

    named: Mapping[str, Any]
    required: tuple[str, ...]
    more: Any

    def both(self, other: Arguments) -> Arguments:
        """What follows both."""
        named = {**self.named, **other.named}
        for name in self.named.keys() & other.named.keys():
            named[name] = {"allOf": [self.named[name], other.named[name]]}
        said = [more for more in (self.more, other.more) if more is not None]
        more = False if False in said else {"allOf": said} if len(said) > 1 else [*said, None][0]
        required = tuple(dict.fromkeys(self.required + other.required))
        return Arguments(named, required, more)


class ToolSchema:
    """A tool's `parameters`. Methods raise `RequestError`, which begins with a JSON pointer."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._root = schema

    def alternatives(self, strict: bool) -> list[Arguments]:
        """The sets of arguments, of which a call has one. With `strict` all that is said of them
        must be enforceable."""
        found = [_settled(one) for one in self._alternatives(self._root, strict, frozenset())]
        unique = [one for i, one in enumerate(found) if one not in found[:i]]
        if not unique:
            raise RequestError("at the root: no arguments can follow it")
        return unique

    def texts(self, schema: Any) -> Texts:
        """The texts that an argument with this schema may be."""
        return self._texts(schema, frozenset())

    def admits_json(self, schema: Any) -> bool:
        """Whether it may be anything but text."""
        return self._admits_json(schema, frozenset())

    def alone(self, schema: Any) -> Any:
        """A part of the whole that stands by itself, whatever it refers to."""
        if not isinstance(schema, Mapping) or not any(_references(schema)):
            return schema
        return {**_moved(schema), "$defs": {_ROOT: _moved(self._root)}}

    def _follow(self, reference: Any, seen: frozenset[str]) -> tuple[Any, frozenset[str]] | None:
        """What a reference names; None where it leads back to itself."""
        if reference in seen:
            return None
        place: Any = self._root
        steps = str(reference).removeprefix("#").split("/")[1:]
        if not str(reference).startswith("#"):
            raise RequestError(f"at the root: the reference {reference!r} leads out of the schema")
        for step in steps:
            key = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(place, list) and key.isdecimal() and int(key) < len(place):
                place = place[int(key)]
            elif isinstance(place, Mapping) and key in place:
                place = place[key]
            else:
                raise RequestError(f"at the root: the reference {reference!r} leads nowhere")
        return place, seen | {str(reference)}

    def _alternatives(self, schema: Any, strict: bool, seen: frozenset[str]) -> list[Arguments]:
        if not isinstance(schema, Mapping):
            return [Arguments({}, (), None)] if schema is True else []
        if "object" not in _kinds(schema):
            return []
        if strict and (key := next((key for key in _OF_OBJECTS if key in schema), None)):
            raise RequestError(f"at the root: DSML cannot enforce {key}")
        named, required = schema.get("properties") or {}, schema.get("required") or ()
        if not isinstance(named, Mapping):
            raise RequestError("at /properties: it must be an object")
        found = [Arguments(named, tuple(required), schema.get("additionalProperties"))]
        for choices in self._parts(schema, seen):
            inner = [one for part, s in choices for one in self._alternatives(part, strict, s)]
            found = [a.both(b) for a, b in product(found, inner)]
            if len(found) > MOST_ALTERNATIVES:
                raise RequestError(
                    f"at the root: it has more than {MOST_ALTERNATIVES} alternatives"
                )
        return found

    def _parts(
        self, schema: Mapping[str, Any], seen: frozenset[str]
    ) -> Iterator[list[tuple[Any, frozenset[str]]]]:
        """Lists of schemas, of each of which one must hold beside `schema` itself."""
        if "$ref" in schema:
            followed = self._follow(schema["$ref"], seen)
            yield [followed] if followed else []
        for part in _list(schema, "allOf"):
            yield [(part, seen)]
        for key in ("anyOf", "oneOf"):
            if key in schema:
                yield [(part, seen) for part in _list(schema, key)]

    def _texts(self, schema: Any, seen: frozenset[str]) -> Texts:
        if not isinstance(schema, Mapping):
            return ALL if schema is True else NONE
        found = ALL if "string" in _kinds(schema) else NONE
        values = _values(schema)
        if values is not None:
            texts = tuple(value for value in values if isinstance(value, str))
            found = found.both(Texts(False, texts))
        for choices in self._parts(schema, seen):
            inner = NONE
            for part, followed in choices:
                inner = inner.either(self._texts(part, followed))
            found = found.both(inner)
        unbound = found.unbound or next((key for key in _OF_TEXT if key in schema), None)
        return found._replace(unbound=unbound)

    def _admits_json(self, schema: Any, seen: frozenset[str]) -> bool:
        if not isinstance(schema, Mapping):
            return schema is True
        values = _values(schema)
        if not _kinds(schema) - {"string"} or (
            values is not None and all(isinstance(value, str) for value in values)
        ):
            return False
        return all(
            any(self._admits_json(part, followed) for part, followed in choices)
            for choices in self._parts(schema, seen)
        )


_ALL_KINDS = frozenset(["string", "number", "integer", "boolean", "array", "object", "null"])


def _kinds(schema: Mapping[str, Any]) -> frozenset[str]:
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return frozenset([kinds])
    return frozenset(map(str, kinds)) if isinstance(kinds, list) else _ALL_KINDS


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    """All that a value may be, where the schema lists it."""
    if "const" in schema:
        return [schema["const"]]
    return list(schema["enum"]) if isinstance(schema.get("enum"), list) else None


def _list(schema: Mapping[str, Any], key: str) -> list[Any]:
    parts = schema.get(key, [])
    return list(parts) if isinstance(parts, Sequence) and not isinstance(parts, str) else []


def _settled(one: Arguments) -> Arguments:
    """With every required argument named."""
    left = [name for name in one.required if name not in one.named]
    if left and one.more is False:
        raise RequestError(f"at /required: {left[0]!r} is required, but not allowed")
    others = dict.fromkeys(left, True if one.more is None else one.more)
    return one._replace(named={**one.named, **others})


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, Mapping):
        if "$ref" in schema:
            yield str(schema["$ref"])
        for _, part in subschemas("", schema):
            yield from _references(part)


def _moved(schema: Any) -> Any:
    """The same with references to where the root is put."""
    if isinstance(schema, list):
        return [_moved(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and str(value).startswith("#"):
            found[key] = f"#/$defs/{_ROOT}{str(value)[1:]}"
        elif key in ONE_SCHEMA or (key in SCHEMA_LISTS and isinstance(value, list)):
            found[key] = _moved(value)
        elif key in SCHEMA_MAPS and isinstance(value, Mapping):
            found[key] = {name: _moved(part) for name, part in value.items()}
        else:
            found[key] = value
    return found
