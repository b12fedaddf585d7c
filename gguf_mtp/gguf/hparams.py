"""Typed look-ups in a GGUF's metadata, with the architecture's prefix. It knows no architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gguf_mtp.errors import LoadFailed

__all__ = ["Hparams"]


class Hparams:
    """The hyperparameters `ARCH.*` of one model. Raises `LoadFailed` on a missing or odd value."""

    def __init__(self, kv: Mapping[str, Any], arch: str, path: str) -> None:
        self.arch = arch
        self.kv, self._path = kv, path

    def get(self, name: str, default: Any = None) -> Any:
        return self.kv.get(f"{self.arch}.{name}", default)

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number, 0 or more. Of a value per layer, all must be equal."""
        values = self._numbers(name, default)
        if len(set(values)) != 1:
            raise LoadFailed(f"{self._path}: {self.arch}.{name} differs from layer to layer")
        return values[0]

    def largest(self, name: str, default: int | None = None) -> int:
        """A whole number, 0 or more; the largest of a value per layer."""
        return max(self._numbers(name, default))

    def by_layer(self, name: str, n_layer: int) -> list[int]:
        """Whole numbers of `n_layer` layers, from a value for each or one for all."""
        values = self._numbers(name, None)
        if len(values) == 1:
            return values * n_layer
        if len(values) < n_layer:
            raise LoadFailed(
                f"{self._path}: {self.arch}.{name} has {len(values)} values for {n_layer} layers"
            )
        return values[:n_layer]

    @property
    def n_vocab(self) -> int:
        """The number of tokens: of the vocabulary in the file, else the announced one, else 0."""
        tokens = self.kv.get("tokenizer.ggml.tokens")
        if isinstance(tokens, int):
            return tokens
        return len(tokens) if isinstance(tokens, list) else self.count("vocab_size", 0)

    def _numbers(self, name: str, default: int | None) -> list[int]:
        value = self.get(name, default)
        if value is None:
            raise LoadFailed(f"{self._path} lacks {self.arch}.{name} in its header")
        values = value if isinstance(value, list) and value else [value]
        if not all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values):
            raise LoadFailed(
                f"{self._path}: {self.arch}.{name} is {value!r}, but must be a whole number"
            )
        return values
