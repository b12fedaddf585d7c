"""Where an answer's tokens came from, told in a stream."""

from __future__ import annotations

import random
from typing import Any

import pytest

from gguf_mtp.answers.token_sources import TokenSource, TokenSources
from gguf_mtp.types import Chunk
from tests.support.chat_formats import CHATML, V31
from tests.support.fakes import FakeTarget
from tests.support.scripted import Answer, ScriptedEngine
from tests.support.serving import served_of, serving
from tests.unit.test_engine import GREEDY, engine_of


def test_tokens_come_one_by_one_with_their_source() -> None:
    origins = TokenSources()
    told = []
    for chunk in (
        Chunk(1, [], 0),
        Chunk(1, [5, 6, 7], 2, source="mtp", n_drafted=3),
        Chunk(1, [8], 0),
        Chunk(1, [9, 4], 2, "stop", source="ngram", n_drafted=8),
    ):
        for part in origins.split(chunk):
            told.append((list(part.tokens), part.n_from_draft, part.finish_reason, origins.take()))
    assert told == [
        ([], 0, None, TokenSource("target", 0, 0, 0, 0)),
        ([5], 1, None, TokenSource("mtp", 1, 1, 3, 2)),
        ([6], 1, None, TokenSource("mtp", 1, 0, 0, 0)),
        ([7], 0, None, TokenSource("target", 1, 0, 0, 0)),
        ([8], 0, None, TokenSource("target", 1, 1, 0, 0)),
        ([9], 1, None, TokenSource("ngram", 1, 1, 8, 2)),
        ([4], 1, "stop", TokenSource("ngram", 1, 0, 0, 0)),
    ]


def test_an_empty_end_stays_one() -> None:
    end = Chunk(1, [], 0, "stop", source="mtp", n_drafted=2)
    assert list(TokenSources().split(end)) == [end]


def test_what_is_held_back_counts_with_the_next() -> None:
    origins = TokenSources()
    for _ in origins.split(Chunk(1, [5, 6], 1, source="mtp", n_drafted=2)):
        pass
    assert origins.take() == TokenSource("target", 2, 1, 2, 1)


def test_an_engines_chunks_say_what_was_drafted() -> None:
    engine = engine_of(FakeTarget(), 3)
    id_ = engine.submit([3, 1, 4], GREEDY, 20)
    chunks = []
    while not engine.is_idle:
        chunks += [c for c in engine.step() if c.seq == id_ and c.tokens]
    assert sum(c.n_drafted for c in chunks) == engine.totals.drafted > 0
    assert {c.source for c in chunks if c.n_drafted} == {"mtp"}


def choices(events: list[Any]) -> list[dict[str, Any]]:
    return [c for e in events if isinstance(e, dict) for c in e["choices"] if "token_source" in c]


@pytest.mark.server
def test_a_stream_tells_each_tokens_source_and_the_text_stays() -> None:
    engine = ScriptedEngine(lambda *_: Answer("one two", chunk=3))
    with serving(engine, served_of(engine, CHATML)) as server:
        plain = server.events()
        events = server.events(return_token_sources=True)
    text = "".join(e["choices"][0]["delta"].get("content", "") for e in plain[:-1])
    told = choices(events)
    assert "".join(c["delta"]["content"] for c in told) == text == "one two"
    assert [(c["delta"]["content"], c["token_source"]) for c in told] == [
        ("o", "mtp"),
        ("n", "mtp"),
        ("e", "target"),
        (" ", "mtp"),
        ("t", "mtp"),
        ("w", "target"),
        ("o", "target"),
    ]
    assert told[0]["counts"] == {"tokens": 1, "rounds": 1, "drafted": 2, "accepted": 2}
    total = {k: sum(c["counts"][k] for c in told) for k in told[0]["counts"]}
    timings = events[-2]["timings"]
    assert total == {
        "tokens": 7,
        "rounds": timings["rounds"],
        "drafted": timings["drafted"],
        "accepted": timings["accepted"],
    }
    assert not choices(plain)


@pytest.mark.server
def test_split_tokens_give_the_same_reasoning_content_and_stop() -> None:
    """Whatever the pieces: reasoning, half characters, and a stop string over several tokens."""
    rng = random.Random(0)
    text = "I think é🐻 so</think>Well, é🐻 STOP and more"
    engine = ScriptedEngine(lambda *_: Answer(text, chunk=rng.randint(1, 7)))
    ask = {"stop": ["STOP"], "chat_template_kwargs": {"thinking": True}}
    with serving(engine, served_of(engine, V31)) as server:
        for _ in range(10):
            told = choices(server.events(return_token_sources=True, **ask))
            deltas = [c["delta"] for c in told]
            assert "".join(d.get("reasoning_content", "") for d in deltas) == "I think é🐻 so"
            assert "".join(d.get("content", "") for d in deltas) == "Well, é🐻 "
            assert len(told) > 15
