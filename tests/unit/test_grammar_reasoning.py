"""When a grammar begins, and when an answer may end."""

from __future__ import annotations

import pytest

from gguf_mtp.grammar.matching import Thinking
from gguf_mtp.grammar.reasoning import GrammarState, MinTokens
from tests.support.words import END, N_VOCAB, STOP, WordVocab, grammars

GRAMMARS = grammars()
VOCAB = WordVocab()


def reasoning(lark: str) -> GrammarState:
    return GRAMMARS.compile(lark).follow_after(Thinking(b"</think>", VOCAB.piece))


def tokens_of(raw: str) -> list[int]:
    return VOCAB.tokenize(raw, add_special=False)


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_it_begins_behind_the_reasoning_wherever_rounds_end(size: int) -> None:
    constraint = reasoning('start: "ab"')
    tokens = tokens_of("so </thin </think>")
    while tokens:
        assert constraint.allowed(()) is None
        assert constraint.allowed(tokens[:-1]) is None
        chunk, tokens = tokens[:size], tokens[size:]
        constraint.commit(chunk)
    ids = {int(i) for i in constraint.allowed(()).nonzero()[0]}
    blanks = {ord(" "), ord("\n"), 265, 266}
    assert ids == {ord("a"), 257} | blanks
    constraint.commit(tokens_of("\n\n"))
    constraint.commit(tokens_of(" "))
    assert {int(i) for i in constraint.allowed(()).nonzero()[0]} == {ord("a"), 257}
    constraint.commit([257])
    assert {int(i) for i in constraint.allowed(()).nonzero()[0]} == {END, STOP}
    assert constraint.failure is None


def test_a_draft_may_end_the_reasoning() -> None:
    constraint = reasoning('start: "ab" "c"')
    constraint.commit(tokens_of("so </thi"))
    draft = [*tokens_of("nk>"), ord("\n"), 257]
    assert constraint.allowed(draft[:2]) is None
    assert ord("c") not in constraint.allowed(draft[:3]).nonzero()[0]
    assert [int(i) for i in constraint.allowed(draft).nonzero()[0]] == [ord("c")]
    assert constraint.allowed(draft[:2]) is None
    constraint.commit([*draft, ord("c")])
    assert {int(i) for i in constraint.allowed(()).nonzero()[0]} == {END, STOP}


def test_white_space_of_the_grammar_itself_is_not_skipped() -> None:
    constraint = reasoning('start: "\\n\\nab"')
    constraint.commit([*tokens_of("</think>"), 266])
    assert {int(i) for i in constraint.allowed(()).nonzero()[0]} == {ord("a"), 257}


def test_text_in_the_token_that_ends_the_reasoning_cannot_be_put_right() -> None:
    inner = GRAMMARS.compile('start: "ab"')
    pieces = {1: b"</think", 2: b">\n", 3: b">x"}
    good = inner.follow_after(Thinking(b"</think>", pieces.__getitem__))
    good.commit([1, 2])
    assert good.failure is None
    bad = inner.follow_after(Thinking(b"</think>", pieces.__getitem__))
    bad.commit([1, 3])
    assert bad.failure == "the token that ends the reasoning also contains answer text"
    assert {int(i) for i in bad.allowed(()).nonzero()[0]} >= {END, STOP}


def test_an_answer_does_not_end_before_its_time() -> None:
    constraint = MinTokens(3, {END, STOP}, N_VOCAB)
    constraint.commit([1])
    assert {int(i) for i in (~constraint.allowed([2])).nonzero()[0]} == {END, STOP}
    assert constraint.allowed([2, 3]) is None
    constraint.commit([2, 3])
    assert constraint.allowed(()) is None
