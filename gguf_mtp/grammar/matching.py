"""Grammars that an answer must obey: which tokens may come next, whatever they are drawn from.

llguidance does the parsing; measured against llama.cpp's own sampler in `bench/grammar.py`. A mask
holds every token whose bytes keep the text inside the grammar: nothing is forced, so tokenisation
stays the model's own choice, and a token that spans two parts of the grammar is as good as two.
Control tokens are no text: only a grammar that names them lets them through. Knows neither logits
nor drafts nor HTTP.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from gguf_mtp.deep_stack import with_stack
from gguf_mtp.errors import RequestError
from gguf_mtp.grammar.library_errors import reason_of
from gguf_mtp.grammar.reasoning import (
    AfterOptionalReasoning,
    AfterReasoning,
    GrammarState,
    Mask,
    Reasoning,
    TriggeredGrammar,
)

if TYPE_CHECKING:  # its import takes 40 ms, which only those who ask for a grammar shall wait for
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["Grammar", "GrammarMatcher", "Grammars", "Thinking", "TokenVocabulary", "quoted"]

MAX_CHARS = 1 << 20
"""Of a grammar's source."""
MAX_RULES = 2000
"""Rules of a grammar, and references of a schema. llguidance follows them one inside of the other
on the stack; 900 in a chain take less than 16 MiB."""
STACK = 64 << 20
"""Bytes of stack to compile with."""
N_KEPT = 32
"""Compiled grammars that are kept for the next request."""
N_TRIED = 4
"""Rows that are tried before a grammar is taken: what explodes usually does so at once."""
_RULE = re.compile(r"^[ \t]*[?!]?[A-Za-z_]\w*(?:\[[^\]\n]*\])?[ \t]*:", re.MULTILINE)
_REFERENCE = re.compile(r'"\$ref"\s*:')
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'


class TokenVocabulary(Protocol):
    """What a grammar needs of a vocabulary (`llama.Vocab`)."""

    def tokenize(self, text: str, add_special: bool, parse_special: bool = True) -> list[int]: ...
    def piece(self, token: int) -> bytes: ...


class _Tables(NamedTuple):
    """`ends` and `blanks`: bool [n_vocab], the end tokens, and those that are only white space."""

    tokenizer: LLTokenizer
    ends: Mask
    blanks: Mask


class Grammars:
    """Compiles grammars for one vocabulary of `n_vocab` tokens, which `end_tokens` end.

    The vocabulary is read when the first grammar comes. May be used by several threads.
    """

    def __init__(self, vocab: TokenVocabulary, n_vocab: int, end_tokens: frozenset[int]) -> None:
        self.vocab, self.end_tokens = vocab, end_tokens
        self._n_vocab = n_vocab
        self._lock = threading.Lock()
        self._tables: _Tables | None = None
        self._compiled: OrderedDict[str, Grammar] = OrderedDict()  # the newest last

    def compile(self, lark: str) -> Grammar:
        """A grammar in llguidance's dialect of Lark.

        Raises `RequestError` that says what is wrong with it, by line and column where that is
        known, or that it is too large or too slow.
        """
        with self._lock:
            known = self._compiled.get(lark)
            if known is not None:
                self._compiled.move_to_end(lark)
                return known
        grammar = with_stack(STACK, lambda: self._compile(lark))
        with self._lock:
            self._compiled[lark] = grammar
            while len(self._compiled) > N_KEPT:
                self._compiled.popitem(last=False)
        return grammar

    def _compile(self, lark: str) -> Grammar:
        from llguidance import LLMatcher, LLParserLimits

        if len(lark) > MAX_CHARS:
            raise RequestError(
                f"it has {len(lark)} characters, but at most {MAX_CHARS} are allowed"
            )
        try:
            lark.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"it is not Unicode: {error.reason}") from None
        for what, pattern in (("rules", _RULE), ("references", _REFERENCE)):
            n = sum(1 for _ in pattern.finditer(lark))
            if n > MAX_RULES:
                raise RequestError(f"it has {n} {what}, but at most {MAX_RULES} are allowed")
        if not self.end_tokens:
            raise RequestError("the model has no end token, so a grammar cannot end its answers")
        tables = self._read()
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(tables.tokenizer, lark + _OPTIONS, log_level=0, limits=limits)
        if matcher.is_error():
            raise RequestError(reason_of(matcher.get_error()))
        grammar = Grammar(matcher, tables)
        grammar.follow().try_out()
        return grammar

    def token(self, text: str) -> int | None:
        """The token that `text` names or is; None where it is several."""
        ids = self.vocab.tokenize(text, add_special=False)
        return ids[0] if len(ids) == 1 else None

    def marker(self, text: str) -> str:
        """Lark for `text`, which is one token in many vocabularies: that token then, and no other
        spelling; otherwise its characters."""
        token = self.token(text)
        return quoted(text) if token is None else f"<[{token}]>"

    def spelled(self, text: str, markers: Sequence[str]) -> str:
        """Lark for `text`, each of `markers` in it as the token it is."""
        pieces = re.split(f"({'|'.join(map(re.escape, markers))})", text)
        return " ".join(
            self.marker(piece) if piece in markers else quoted(piece) for piece in pieces if piece
        )

    def _read(self) -> _Tables:
        with self._lock:
            if self._tables is None:
                self._tables = self._make_tables()
            return self._tables

    def _make_tables(self) -> _Tables:
        from llguidance import LLTokenizer, TokenizerWrapper

        pieces = [self.vocab.piece(i) for i in range(self._n_vocab)]
        ends, blanks = np.zeros((2, self._n_vocab), np.bool_)
        ends[list(self.end_tokens)] = True
        blanks[[i for i, piece in enumerate(pieces) if piece and not piece.strip(b" \n")]] = True
        # 0xFF, which no text holds, makes a token one that only its number names.
        tokens = [
            piece if piece and not ends[i] else b"\xff<|%d|>" % i for i, piece in enumerate(pieces)
        ]
        wrapped = TokenizerWrapper(_Tokens(tokens, self.vocab, min(self.end_tokens)))
        return _Tables(LLTokenizer(wrapped, eos_token=sorted(self.end_tokens)), ends, blanks)


class _Tokens:
    """A vocabulary as llguidance's `TokenizerWrapper` wants it."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], vocab: TokenVocabulary, eos_token_id: int) -> None:
        self.tokens, self.eos_token_id = tokens, eos_token_id
        self.special_token_ids = [i for i, t in enumerate(tokens) if t.startswith(b"\xff")]
        self._vocab = vocab

    def __call__(self, text: bytes) -> list[int]:
        return self._vocab.tokenize(text.decode(errors="replace"), False, False)


class Thinking(NamedTuple):
    """How an answer may begin with reasoning: its text up to `close`; `piece` gives a token's
    bytes. With `opening` it reasons only if it begins with that token."""

    close: bytes
    piece: Callable[[int], bytes]
    opening: int | None = None

    def before(self, bind: Callable[[Reasoning | None], GrammarState]) -> GrammarState:
        """What `bind` makes for a text that begins with reasoning, or for either kind."""
        behind = bind(Reasoning(self.close, self.piece))
        return (
            behind
            if self.opening is None
            else AfterOptionalReasoning(bind(None), behind, self.opening)
        )


class Grammar:
    """A compiled grammar; every answer that obeys it needs a follower of its own."""

    def __init__(self, matcher: LLMatcher, tables: _Tables) -> None:
        self._matcher, self._tables = matcher, tables

    def follow(self) -> GrammarMatcher:
        """Obeyed from the answer's first token on."""
        return GrammarMatcher(self._matcher.deep_copy(), self._tables.ends)

    def follow_after(self, thinking: Thinking) -> GrammarState:
        """Obeyed from the end of the reasoning on."""
        inner, blanks = self.follow(), self._tables.blanks
        return thinking.before(
            lambda reasoning: AfterReasoning(inner, blanks, reasoning) if reasoning else inner
        )

    def follow_once(self, openings: frozenset[int], thinking: Thinking | None) -> GrammarState:
        """Obeyed from the first of the tokens `openings` on, which belongs to its text; one within
        the reasoning is none."""
        inner = self.follow()
        if thinking is None:
            return TriggeredGrammar(inner, openings)
        return thinking.before(lambda reasoning: TriggeredGrammar(inner, openings, reasoning))


class GrammarMatcher:
    """A `params.Constraint`. `failure` says why the grammar could not be followed to its end; only
    end tokens are allowed from there on.

    What was computed for a draft is kept until the next commit, so that judging it costs nothing.
    """

    def __init__(self, matcher: LLMatcher, ends: Mask) -> None:
        self.failure: str | None = None
        self._matcher, self._ends = matcher, ends
        self._bits = np.zeros((len(ends) + 31) // 32, np.uint32)
        self._ahead: list[int] = []  # what the matcher has seen beyond the committed tokens
        self._masks: dict[tuple[int, ...], Mask] = {}

    def allowed(self, after: Sequence[int]) -> Mask:
        key = tuple(after)
        mask = self._masks.get(key)
        if mask is None:
            mask = self._masks[key] = self._mask(key)
        return mask

    def commit(self, tokens: Sequence[int]) -> None:
        self._masks.clear()
        if self.failure is None and not self._move(tokens):
            error = self._matcher.get_error()
            token = self._first_end(tokens)[len(self._ahead)]
            self.fail(reason_of(error) if error else f"it does not allow token {token}")
        self._ahead.clear()

    def try_out(self) -> None:
        """Raises `RequestError` when the first rows are too much for the parser, or there is
        nothing that could be written. Only for a follower that nobody else uses."""
        for _ in range(N_TRIED):
            mask = self.allowed(())
            if self.failure is not None:
                raise RequestError(self.failure)
            ids = (mask & ~self._ends).nonzero()[0]
            if not len(ids):
                return
            self.commit([int(ids[0])])

    def _mask(self, after: tuple[int, ...]) -> Mask:
        if self.failure is not None or not self._move(after) or len(self._ahead) < len(after):
            return self._ends  # behind an end token nothing else follows
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        if self._matcher.is_error():  # the mask is that of the end tokens then
            self.fail(reason_of(self._matcher.get_error()))
            return self._ends
        bits = np.unpackbits(self._bits.view(np.uint8), count=len(self._ends), bitorder="little")
        return bits.view(np.bool_)

    def _move(self, tokens: Sequence[int]) -> bool:
        """Takes the matcher to where `tokens` follow the committed ones, up to an end token;
        whether the grammar lets it."""
        tokens = self._first_end(tokens)
        pairs = zip(self._ahead, tokens, strict=False)
        n = next(
            (i for i, (a, b) in enumerate(pairs) if a != b), min(len(self._ahead), len(tokens))
        )
        if n < len(self._ahead):
            self._matcher.rollback(len(self._ahead) - n)
        taken = self._matcher.try_consume_tokens(list(tokens[n:])) if n < len(tokens) else 0
        self._ahead = list(tokens[: n + taken])
        return n + taken == len(tokens)

    def _first_end(self, tokens: Sequence[int]) -> Sequence[int]:
        """`tokens` before the first end token."""
        return next((tokens[:i] for i, t in enumerate(tokens) if self._ends[t]), tokens)

    def fail(self, reason: str) -> None:
        """From here on only end tokens are allowed; `reason` becomes `failure`."""
        self.failure = reason


def quoted(text: str) -> str:
    """`text` as a string of Lark."""
    return json.dumps(text)
