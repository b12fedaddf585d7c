"""A model's vocabulary: tokens to text and back."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import llama_cpp as L

from gguf_mtp.deep_stack import with_stack
from gguf_mtp.errors import RequestError
from gguf_mtp.llama.recursion_depth import deepest
from gguf_mtp.llama.special_tokens import SpecialToken, SpecialTokens
from gguf_mtp.llama.tokenizer import Tokenizer, Words

FLAT, DEEPEST = 2_000, 250_000
"""Characters of a text that any stack holds; of a run that the tokenizer is let go through."""
STACK, STACK_OF_ONE = 1 << 20, 1 << 11
"""Bytes; those of one character were between 200 and 400 with the expressions of all vocabularies
that come with llama.cpp."""
_PRE = b"tokenizer.ggml.pre"
_CONTROL = L.LLAMA_TOKEN_ATTR_CONTROL | L.LLAMA_TOKEN_ATTR_UNKNOWN
_SPECIAL = _CONTROL | L.LLAMA_TOKEN_ATTR_USER_DEFINED


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
        is_bpe = L.llama_vocab_type(self._vocab) == L.LLAMA_VOCAB_TYPE_BPE
        self._pre = meta(model, _PRE) if is_bpe else ""  # others do not read it

    def tokenize(self, text: str, add_special: bool, parse_special: bool = True) -> list[int]:
        """Token ids of `text`. `add_special` puts BOS in front when the model wants one;
        `parse_special` reads `<｜User｜>` and the like as the tokens they name.

        Raises `RequestError` for a text that llama.cpp would end the process over.
        """
        return self._tokenizer.tokenize(_unicode(text), add_special, parse_special)

    def prompt_tokens(self, text: str, add_special: bool, most: int, guard: str) -> list[int]:
        """As `tokenize`, of a prompt that may have `most` tokens, and with the letter `guard` left
        out of what stands between special tokens (see `guarded`).

        Raises `ContextFull`, before it takes time, for a text that must be more tokens.
        """
        return self._tokenizer.tokenize(_unicode(text), add_special, True, guard, most)

    def guarded(self, text: str, guard: str, but: Sequence[str] = ()) -> str:
        """`text` in which markers of control tokens are none: `guard` breaks them, until `tokenize`
        takes it out again. Those in `but` stay."""
        return self._special.guarded(text, guard, but)

    @cached_property
    def _special(self) -> SpecialTokens:
        attrs = (L.llama_vocab_get_attr(self._vocab, t) for t in range(self.n_tokens))
        return SpecialTokens(
            self._special_token(t, attr) for t, attr in enumerate(attrs) if attr & _SPECIAL
        )

    def _special_token(self, token: int, attr: int) -> SpecialToken:
        return SpecialToken(
            token,
            self._text_of(token),
            bool(attr & _CONTROL),
            bool(attr & L.LLAMA_TOKEN_ATTR_LSTRIP),
            bool(attr & L.LLAMA_TOKEN_ATTR_RSTRIP),
        )

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        ends = self._tokenize("", add_special=True, parse_special=False)
        n_head = 1 if ends and self.adds_bos else 0
        return Tokenizer(
            Words(
                tokenize=lambda text: self._tokenize(text, add_special=False, parse_special=False),
                special=self._special,
                head=tuple(ends[:n_head]),
                tail=tuple(ends[n_head:]),
                pre=self._pre,
                longest=lambda: self._longest,
            )
        )

    @cached_property
    def _longest(self) -> int:
        """Bytes of the longest token."""
        return max(len(self.piece(token)) for token in range(self.n_tokens))

    def _tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        """By llama.cpp alone, with as much stack as it may need."""
        if len(text) <= FLAT:
            return self._ids(text, add_special, parse_special)
        depth = len(text) if len(text) <= DEEPEST else deepest(text)
        if depth > DEEPEST:
            raise RequestError(
                f"the text has {depth} characters of one kind in a row, such as letters without "
                f"punctuation; the tokenizer takes at most {DEEPEST}"
            )
        n_bytes = STACK + depth * STACK_OF_ONE
        return with_stack(n_bytes, lambda: self._ids(text, add_special, parse_special))

    def _ids(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        if self._vocab is None:
            raise RequestError("the model is closed")
        raw = text.encode()
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


def _unicode(text: str) -> str:
    """Without the halves of characters that JSON may bring."""
    return text.encode(errors="replace").decode()


def meta(model: Any, key: bytes) -> str:
    """A text of the file's header; empty without."""
    buffer = ctypes.create_string_buffer(64)
    n = L.llama_model_meta_val_str(model, key, buffer, len(buffer))
    return buffer.value.decode(errors="replace") if n > 0 else ""
