"""Keeps what users write from being read as the chat template's own markers.

A message that holds `<｜Assistant｜>` would end the user's turn and begin the model's. So before
the template is rendered a letter that nothing else uses is put inside every control token's marker;
the tokenizer takes it out again from what stands between special tokens (`prompt_tokens`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from gguf_mtp.answers.constraint import Vocabulary
from gguf_mtp.chat import reasoning
from gguf_mtp.errors import RequestError

__all__ = ["Guarded", "guarded"]

_LETTERS = (*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE))
"""Unicode's letters for private use."""
_REASONING = (reasoning.OPEN, reasoning.CLOSE)
"""What a template may look for in the assistant's own messages."""


class Guarded(NamedTuple):
    """`values` as given, with markers broken by `letter`; nothing was broken where it is empty."""

    values: Sequence[Any]
    letter: str


def guarded(vocab: Vocabulary, values: Sequence[Any]) -> Guarded:
    """`values` are JSON: messages, tools, variables of a template. Raises `RequestError` for what
    is nested too deeply."""
    try:
        values = [_plain_arguments(value) for value in values]
        texts = list(_texts(values))
        if all(vocab.guarded(text, "!") == text for text in texts):
            return Guarded(values, "")
        used = set().union(*texts)
        letter = next((chr(c) for c in _LETTERS if chr(c) not in used), None)
        if letter is None:
            raise RequestError("the messages use every letter that Unicode has for private use")
        return Guarded([_broken(vocab, value, letter, ()) for value in values], letter)
    except RecursionError:
        raise RequestError("messages, tools or variables are nested too deeply") from None


def _plain_arguments(value: Any) -> Any:
    """Calls' arguments with no letter escaped: a template may read them, and an escaped marker
    would be one then."""
    if isinstance(value, Mapping):
        plain = {key: _plain_arguments(item) for key, item in value.items()}
        if isinstance(plain.get("arguments"), str) and "\\u" in plain["arguments"]:
            with suppress(ValueError):
                read = json.loads(plain["arguments"])
                plain["arguments"] = json.dumps(read, ensure_ascii=False)
        return plain
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain_arguments(item) for item in value]
    return value


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _texts(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _texts(item)


def _broken(vocab: Vocabulary, value: Any, letter: str, but: Sequence[str]) -> Any:
    if isinstance(value, str):
        return vocab.guarded(value, letter, but)
    if isinstance(value, Mapping):
        but = _REASONING if value.get("role") == "assistant" else but
        return {
            _broken(vocab, key, letter, but): _broken(vocab, item, letter, but)
            for key, item in value.items()
        }
    if isinstance(value, Sequence):
        return [_broken(vocab, item, letter, but) for item in value]
    return value
