"""Random JSON schemas, nested, over everything that answers are commonly asked for."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

NAMES = ["name", "id", "größe", 'quo"te', "a b", "x", "next", "list", "nested-key", "日本"]
PATTERNS = ["[a-z]{1,8}", "\\d{3}-\\d{2}", "(red|green|blue)!?", "[A-Z][a-z]{0,6}", "x*y{2,3}"]
FORMATS = ["date", "time", "date-time", "uuid", "ipv4"]
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
"""What tools ask for in tests: short, so that every answer can end."""


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """Its values are of bounded length, so that every answer can end; references end as well."""
    if depth == 3 and rng.random() < 0.1:
        node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}
        return {"$ref": "#/$defs/node", "$defs": {"node": node | {"additionalProperties": False}}}
    makers: list[Callable[[random.Random, int], dict[str, Any]]] = [_scalar, _choice]
    if depth:
        makers = [_object, _object, _array, _union, _scalar]
    return rng.choice(makers)(rng, depth)


def _scalar(rng: random.Random, _depth: int) -> dict[str, Any]:
    low, high = sorted(rng.sample(range(-1000, 1000), 2))
    bounds = rng.choice(
        [
            {"minimum": low, "maximum": high},
            {"exclusiveMinimum": low, "maximum": high},
            {"minimum": low / 8, "exclusiveMaximum": low / 8 + 50},
            {"minimum": low, "maximum": high + 7, "multipleOf": 7},
        ]
    )
    return rng.choice(
        [
            {"type": "integer"} | bounds,
            {"type": "number", "multipleOf": 0.25} | bounds,
            {"type": "boolean"},
            {"type": "null"},
            {"type": "string", "maxLength": rng.randint(0, 12)},
            {"type": "string", "minLength": 3, "maxLength": rng.randint(3, 9)},
            {"type": "string", "pattern": f"^{rng.choice(PATTERNS)}$"},
            {"type": "string", "format": rng.choice(FORMATS)},
        ]
    )


def _choice(rng: random.Random, _depth: int) -> dict[str, Any]:
    values = [1, -2.5, "a", "ab", 'q"\\', "日本\n", None, True, [1, "x"], {"k": []}]
    if rng.random() < 0.3:
        return {"const": rng.choice(values)}
    return {"enum": rng.sample(values, rng.randint(1, 5))}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(1, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
        "additionalProperties": False,
    }
    if rng.random() < 0.8:
        schema["required"] = rng.sample(names, rng.randint(0, len(names)))
    return schema


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    schema: dict[str, Any] = {"type": "array", "minItems": least, "maxItems": least + 2}
    if rng.random() < 0.3:
        first = [random_schema(rng, depth - 1) for _ in range(2)]
        return schema | {"prefixItems": first, "items": random_schema(rng, 0)}
    return schema | {"items": random_schema(rng, depth - 1)}


def _union(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.3:
        return {"type": ["null", "boolean", "integer"], "minimum": -5, "maximum": 5}
    return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randint(2, 3))]}
