"""A grammar that binds what stands behind an answer's reasoning, and the bytes of its markers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from gguf_mtp.chat import reasoning
from gguf_mtp.grammar.matching import Grammar, Thinking
from gguf_mtp.grammar.reasoning import GrammarState

__all__ = ["Vocabulary", "constraint_after", "piece_of"]


class Vocabulary(Protocol):
    """What text needs of a vocabulary (`llama.Vocab`)."""

    bos: str
    eos: str
    chat_template: str | None

    def tokenize(self, text: str, add_special: bool, parse_special: bool = True) -> list[int]: ...
    def prompt_tokens(self, text: str, add_special: bool, most: int, guard: str) -> list[int]: ...
    def guarded(self, text: str, guard: str, but: Sequence[str] = ()) -> str: ...
    def piece(self, token: int) -> bytes: ...


def constraint_after(
    grammar: Grammar, vocab: Vocabulary, prompt: str, openings: frozenset[int] = frozenset()
) -> GrammarState:
    """Obedience to `grammar` behind the reasoning of an answer to `prompt`, of a model that may
    reason; with no prompt from the first token on. With `openings` not before one of these tokens
    has come."""
    thinking = _thinking(vocab, prompt)
    if openings:
        return grammar.follow_once(openings, thinking)
    return grammar.follow() if thinking is None else grammar.follow_after(thinking)


def _thinking(vocab: Vocabulary, prompt: str) -> Thinking | None:
    close, piece = reasoning.CLOSE.encode(), piece_of(vocab, [reasoning.CLOSE])
    if reasoning.is_open(prompt):
        return Thinking(close, piece)
    opening = vocab.tokenize(reasoning.OPEN, add_special=False)
    if prompt and reasoning.may_open(prompt) and len(opening) == 1:
        return Thinking(close, piece, opening[0])
    return None


def piece_of(vocab: Vocabulary, markers: Sequence[str]) -> Callable[[int], bytes]:
    """The bytes of a token; `markers` have theirs even where they are control tokens."""
    known: dict[int, bytes] = {}
    for marker in markers:
        ids = vocab.tokenize(marker, add_special=False)
        if len(ids) == 1:
            known[ids[0]] = marker.encode()
    return lambda token: known.get(token) or vocab.piece(token)
