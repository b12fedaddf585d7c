"""How a family of models says what it does otherwise than DeepSeek-V3. It knows no family."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .tensors import Value


class Extra(NamedTuple):
    """A tensor that a family adds to every layer: GGUF name and source name inside the layer."""

    name: str
    source: str
    shape: tuple[int, ...]


def _no_extras(_: Mapping[str, Any]) -> Sequence[Extra]:
    return ()


def _no_metadata(_: Mapping[str, Any]) -> Mapping[str, Value]:
    return {}


@dataclass(frozen=True, slots=True)
class Family:
    """What one family does otherwise than DeepSeek-V3.

    `architecture` is llama.cpp's name; `defaults` are keys that the family's config.json leaves
    unsaid; `extras` and `metadata` are made from config.json.
    """

    architecture: str = "deepseek2"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    extras: Callable[[Mapping[str, Any]], Sequence[Extra]] = _no_extras
    metadata: Callable[[Mapping[str, Any]], Mapping[str, Value]] = _no_metadata
