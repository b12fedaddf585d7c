"""JSON schemas as grammars: what is let through, and where what cannot be enforced lies."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_mtp.errors import RequestError
from gguf_mtp.grammar.json_schema import compile_schema
from tests.support.words import END, STOP, allowed, grammars, text, walk

GRAMMARS = grammars()


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"a/b": {"items": {"type": "strin"}}}}, "at /properties/a~1b/items: Inv"),
        ({"anyOf": [{"type": "null"}, {"uniqueItems": True}]}, "at /anyOf/1: Unimplemented keys"),
        ({"$defs": {"d": {"pattern": "(?=x)"}}, "$ref": "#/$defs/d"}, "at /$defs/d: regex"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}}, "at /properties/a: Pointer"),
        (
            {
                "type": "array",
                "items": {"type": "number", "minimum": 5, "maximum": 3},
                "minItems": 1,
            },
            "at /items: Unsatisfiable",
        ),
        ({"properties": {"x": {"minimum": float("inf")}}}, "at /properties/x/minimum: inf is no"),
        ({"$ref": "#"}, "at the root: it allows no text"),
        ([], "at the root: a schema must be an object"),
        (False, "at the root: Unsatisfiable"),
        (
            {"type": "object", "properties": {f"p{i}": {} for i in range(3000)}},
            "at the root: Current row has",
        ),
    ],
)
def test_a_schema_that_cannot_be_enforced_says_where(schema: object, words: str) -> None:
    with pytest.raises(RequestError, match=r"^at ") as caught:
        compile_schema(GRAMMARS, schema)
    assert str(caught.value).startswith(words)
    assert "\n" not in str(caught.value)


def test_a_schema_nested_without_end_is_refused() -> None:
    schema: dict = {}
    inner = schema
    for _ in range(100_000):
        inner["items"] = {}
        inner = inner["items"]
    with pytest.raises(RequestError, match="nested deeper than 64"):
        compile_schema(GRAMMARS, schema)


def test_looking_for_what_is_wrong_has_an_end() -> None:
    schema: dict = {"enum": [f"choice {i}" for i in range(40_000)], "uniqueItems": True}
    for _ in range(20):
        schema = {"items": schema}
    with pytest.raises(RequestError, match=r"^at /items/items/items: Unimplemented keys"):
        compile_schema(GRAMMARS, schema)


def test_keywords_that_cannot_be_enforced_are_ignored_only_when_asked() -> None:
    schema = {"type": "array", "uniqueItems": True, "items": {"const": 12}, "maxItems": 2}
    with pytest.raises(RequestError):
        compile_schema(GRAMMARS, schema)
    follower = compile_schema(GRAMMARS, schema, lenient=True).follow()
    assert json.loads(text(walk(follower, random.Random(0)))) in ([], [12], [12, 12])


def test_white_space_is_bounded_and_a_pretty_printer_is_not_hindered() -> None:
    grammar = compile_schema(GRAMMARS, {"type": "object"})
    value = {"a": [1, {"b": []}], "c": {"d": "e"}}
    for indent in (None, 2, 4):
        follower = grammar.follow()
        follower.commit(list(json.dumps(value, indent=indent).encode()))
        assert follower.failure is None
        assert allowed(follower) == {END, STOP}
    follower = grammar.follow()
    follower.commit(list(b"{   "))
    assert follower.failure


KEYS = ["type", "properties", "items", "anyOf", "enum", "const", "$ref", "required", "pattern"]
KEYS += [
    "minimum",
    "maxLength",
    "minItems",
    "additionalProperties",
    "oneOf",
    "format",
    "x-guidance",
]
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 10**12)
    | st.floats()
    | st.sampled_from(["object", "array", "string", "number", "#", "#/items", "(a", "\ud800", ""])
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(schema=SCHEMAS)
def test_whatever_is_given_as_a_schema_is_compiled_or_refused(schema: object) -> None:
    try:
        follower = compile_schema(GRAMMARS, schema).follow()
    except RequestError as error:
        words = str(error)
        if not words.startswith("at ") or "\n" in words:
            raise AssertionError(words) from error
        return
    assert follower.allowed(()).any()
