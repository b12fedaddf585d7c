"""A model's vocabulary: tokens to text and back."""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp as L

from gguf_mtp.deep_stack import with_stack
from gguf_mtp.errors import RequestError
from gguf_mtp.llama.recursion_depth import deepest

FLAT, DEEPEST = 2_000, 250_000
"""Characters of a text that any stack holds; of a run that the tokenizer is let go through."""
STACK, STACK_OF_ONE = 1 << 20, 1 << 11
"""Bytes; those of one character were between 200 and 400 with the expressions of all vocabularies
that come with llama.cpp."""


class Vocab:
    """Tokens to text and back. Lives as long as its model."""

    def __init__(self, model: Any) -> None:
        self._vocab = L.llama_model_get_vocab(model)
        self.n_tokens: int = L.llama_vocab_n_tokens(self._vocab)
        self.adds_bos: bool = L.llama_vocab_get_add_bos(self._vocab)
        self.bos = self._text_of(L.llama_vocab_bos(self._vocab))
        self.eos = self._text_of(L.llama_vocab_eos(self._vocab))
        self.end_tokens = frozenset(
            t for t in range(self.n_tokens) if L.llama_vocab_is_eog(self._vocab, t)
        )
        template = L.llama_model_chat_template(model, None)
        self.chat_template: str | None = template.decode(errors="replace") if template else None
        self._pieces: dict[int, bytes] = {}

    def tokenize(self, text: str, add_special: bool, parse_special: bool = True) -> list[int]:
        """Token ids of `text`. `add_special` puts BOS in front when the model wants one;
        `parse_special` reads `<｜User｜>` and the like as the tokens they name.

        Raises `RequestError` for a text that llama.cpp would end the process over.
        """
        if len(text) <= FLAT:
            return self._tokenize(text, add_special, parse_special)
        depth = len(text) if len(text) <= DEEPEST else deepest(text)
        if depth > DEEPEST:
            raise RequestError(
                f"the text has {depth} characters of one kind in a row, such as letters without "
                f"punctuation; the tokenizer takes at most {DEEPEST}"
            )
        n_bytes = STACK + depth * STACK_OF_ONE
        return with_stack(n_bytes, lambda: self._tokenize(text, add_special, parse_special))

    def _tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        if self._vocab is None:
            raise RequestError("the model is closed")
        raw = text.encode("utf-8", errors="replace")
        room = len(raw) + 2
        while True:
            ids = (L.llama_token * room)()
            n = L.llama_tokenize(self._vocab, raw, len(raw), ids, room, add_special, parse_special)
            if n >= 0:
                return list(ids[:n])
            room = -n

    def piece(self, token: int) -> bytes:
        """The bytes a token stands for; control tokens stand for none."""
        known = self._pieces.get(token)
        if known is None:
            known = self._pieces[token] = self._piece(token)
        return known

    def close(self) -> None:
        """Its model is about to be freed."""
        self._vocab = None

    def _piece(self, token: int) -> bytes:
        if self._vocab is None:
            raise RequestError("the model is closed")
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = L.llama_token_to_piece(self._vocab, token, buffer, size, 0, False)
            if n >= 0:
                return buffer.raw[:n]
            size = -n

    def _text_of(self, token: int) -> str:
        if token < 0:
            return ""
        return str(L.llama_vocab_get_text(self._vocab, token).decode(errors="replace"))
