"""A vocabulary of bytes, words and markers, and what a grammar over it must let through."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from gguf_mtp.grammar.matching import GrammarMatcher, Grammars

WORDS = [
    '"',
    "ab",
    "abc",
    '":',
    '{"',
    '"}',
    "null",
    "true",
    "12",
    " ",
    "\n\n",
    "é",
    "日本",
    "</",
    "x}",
]
CONTROL = ["<end>", "<stop>", "<call>", "<sep>"]
N_VOCAB = 256 + len(WORDS) + len(CONTROL)
END, STOP, CALL, SEP = range(N_VOCAB - len(CONTROL), N_VOCAB)


class WordVocab:
    """Token i < 256 is byte i; then come words, which overlap, then markers, which have no text.

    Text is split greedily; `n_read` counts the tokens whose bytes somebody asked for.
    """

    def __init__(self) -> None:
        self.n_read = 0

    def piece(self, token: int) -> bytes:
        self.n_read += 1
        if token < 256:
            return bytes([token])
        return WORDS[token - 256].encode() if token < END else b""

    def tokenize(self, text: str, add_special: bool, parse_special: bool = True) -> list[int]:
        assert not add_special
        known = {w.encode(): 256 + i for i, w in enumerate(WORDS)}
        if parse_special:
            known |= {m.encode(): END + i for i, m in enumerate(CONTROL)}
        raw, ids = text.encode(), []
        while raw:
            longest = max((k for k in known if raw.startswith(k)), key=len, default=raw[:1])
            ids.append(known.get(longest, raw[0]))
            raw = raw[len(longest) :]
        return ids


def grammars() -> Grammars:
    return Grammars(WordVocab(), N_VOCAB, frozenset({END, STOP}))


def may_follow(text: bytes, language: Iterable[str]) -> set[int]:
    """The tokens that keep `text` a beginning of some member of `language`; the end tokens too
    where it is one."""
    vocab, members = WordVocab(), [member.encode() for member in language]
    ids = {
        t for t in range(END) if any(member.startswith(text + vocab.piece(t)) for member in members)
    }
    return ids | ({END, STOP} if text in members else set())


def allowed(follower: GrammarMatcher, after: Sequence[int] = ()) -> set[int]:
    return {int(i) for i in follower.allowed(after).nonzero()[0]}


def text(tokens: Sequence[int]) -> bytes:
    return b"".join(map(WordVocab().piece, tokens))


def walk(follower: GrammarMatcher, rng: random.Random, n: int = 60) -> list[int]:
    """Tokens drawn evenly from what is allowed, up to an end token."""
    tokens: list[int] = []
    while len(tokens) < n:
        token = rng.choice(sorted(allowed(follower)))
        if token in (END, STOP):
            return tokens
        tokens.append(token)
        follower.commit([token])
    raise AssertionError(f"no end after {text(tokens)!r}")
