"""Tokens to what clients see: where an answer ends, and what counts up to there."""

from __future__ import annotations

import random

import pytest

from gguf_mtp.answers.parse import AnswerEvent, AnswerParser, Delta, End, Failure, ParseOptions
from gguf_mtp.chat.tool_calls import CallArguments, CallStart
from gguf_mtp.stats import Stats
from gguf_mtp.types import Chunk
from tests.support.scripted import ByteVocab

VOCAB = ByteVocab()
CALL = '<｜tool▁call▁begin｜>a<｜tool▁sep｜>{"b": 1}<｜tool▁call▁end｜>'
CALLS = f"<｜tool▁calls▁begin｜>{CALL}<｜tool▁calls▁end｜>"


def piece(token: int) -> bytes:
    return VOCAB.text([token]).encode() if token >= 256 else bytes([token])


def read(
    text: str, sizes: list[int], finish: str = "stop", **options
) -> tuple[list[AnswerEvent], bool]:
    """The news of an answer that comes in chunks; whether its reader stopped the engine."""
    news: list[AnswerEvent] = []
    reader = AnswerParser(ParseOptions(options.pop("piece", piece), **options), news.append)
    tokens = VOCAB.tokenize(text, add_special=False)
    while tokens:
        size = sizes.pop(0) if sizes else len(tokens)
        chunk, tokens = tokens[:size], tokens[size:]
        is_last = not tokens
        wants = reader.receive(
            Chunk(1, chunk, 0, finish if is_last else None, Stats(rounds=7) if is_last else None)
        )
        if not wants and not is_last:
            reader.receive(Chunk(1, [], 0, "cancelled", Stats(rounds=7)))
            return news, True
    return news, False


def whole(news: list[AnswerEvent]) -> tuple[str, str, list[int], End]:
    *deltas, end = news
    assert isinstance(end, End)
    assert all(isinstance(delta, Delta) for delta in deltas)
    reasoning = "".join(d.reasoning for d in deltas)
    content = "".join(d.content for d in deltas)
    return reasoning, content, [t for d in deltas for t in d.tokens], end


def test_everything_of_an_answer_is_told_whatever_the_chunks() -> None:
    text = "Hm, <b> é 🐻.\n</think>\n\nIt is STO and 日本.\n"
    rng = random.Random(3)
    for _ in range(50):
        sizes = [rng.randint(1, 7) for _ in text]
        news, stopped = read(text, sizes, thinks=True, stops=["STOP"])
        reasoning, content, tokens, end = whole(news)
        assert not stopped
        assert (reasoning, content) == ("Hm, <b> é 🐻.", "It is STO and 日本.\n")
        assert tokens == VOCAB.tokenize(text, add_special=False)
        n_reasoning = len("Hm, <b> é 🐻.\n".encode()) + 1  # the closing tag is one token
        assert end == End("stop", len(tokens), n_reasoning, Stats(rounds=7))


@pytest.mark.parametrize("size", range(1, 12))
def test_a_stop_string_ends_the_answer_wherever_chunks_end(size: int) -> None:
    news, stopped = read("abc ENDdefghijklmnopqrst", [size] * 30, stops=["END", "fgh"])
    _, content, tokens, end = whole(news)
    assert stopped
    assert content == "abc "
    assert tokens == list(b"abc ")
    assert end == End("stop", 4, 0, Stats(rounds=7), stop="END")


def test_a_stop_string_in_the_last_chunk_wins_over_its_length() -> None:
    news, stopped = read("abcEND", [], finish="length", stops=["END"])
    assert whole(news)[1:] == ("abc", [97, 98, 99], End("stop", 3, 0, Stats(rounds=7), "END"))
    assert not stopped


def test_a_stop_string_inside_reasoning_ends_the_answer() -> None:
    news, _ = read("Hm. END</think>x", [2] * 9, thinks=True, stops=["END"])
    reasoning, content, tokens, end = whole(news)
    assert (reasoning, content, tokens) == ("Hm.", "", list(b"Hm. "))
    assert (end.n_tokens, end.n_reasoning) == (4, 4)


@pytest.mark.parametrize("size", [1, 3, 100])
def test_calls_end_the_answer(size: int) -> None:
    news, stopped = read(f"{CALLS}made up{CALLS}", [size] * 200, max_calls=None)
    *deltas, end = news
    events = [event for delta in deltas for event in delta.calls]
    assert events[0] == CallStart(0, "a")
    assert "".join(e.text for e in events if isinstance(e, CallArguments)) == '{"b": 1}'
    assert "".join(delta.content for delta in deltas) == ""
    assert end.finish == "tool_calls"
    assert stopped is (size < 100)


def test_calls_that_ended_win_over_length_and_calls_that_did_not_do_not() -> None:
    assert whole(read(CALLS, [], finish="length", max_calls=None)[0])[3].finish == "tool_calls"
    cut = CALLS.split('"b"')[0]
    assert whole(read(cut, [], finish="length", max_calls=None)[0])[3].finish == "length"


def test_markers_that_nobody_looks_for_are_what_the_vocabulary_says() -> None:
    assert whole(read(CALLS, [], piece=VOCAB.piece)[0])[1] == 'a{"b": 1}'


def test_a_failure_is_told() -> None:
    news: list[AnswerEvent] = []
    reader = AnswerParser(ParseOptions(piece), news.append)
    error = RuntimeError("x")
    reader.fail(error)
    assert news == [Failure(error)]
