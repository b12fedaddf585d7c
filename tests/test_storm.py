"""Random life of an engine: on decoders without a model, and on the demo model."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gguf_mtp.demo import demo_model
from tests.fakes import N_VOCAB, FakeMtp, FakeTarget
from tests.storm import GREEDY, Storm
from tests.test_engine import NO_END, engine_of, greedy

FOUR = dataclasses.replace(NO_END, n_seq=4, n_ctx=64, n_batch=24)


def fake_prompt(rng: random.Random) -> list[int]:
    return [rng.randrange(N_VOCAB) for _ in range(rng.choice([1, 2, 6, 45]))]


def storm_on_fakes(seed: int, depth: int, n_steps: int) -> Storm:
    target = FakeTarget(4, n_batch=24)
    engine = engine_of(target, depth, FOUR, FakeMtp(4, n_batch=24))
    storm = Storm(engine, greedy, fake_prompt, seed)
    storm.run(n_steps)
    for batch in target.batches:
        assert sum(len(r.tokens) for r in batch) <= 24
    return storm


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), depth=st.sampled_from([0, 1, 2, 5]))
def test_any_order_of_events(seed: int, depth: int) -> None:
    storm_on_fakes(seed, depth, 40)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 1, 2, 5])
def test_ten_thousand_events(depth: int) -> None:
    assert storm_on_fakes(depth, depth, 10_000).n_finished > 1_000


@pytest.mark.slow
@pytest.mark.native
def test_a_minute_on_the_demo_model() -> None:
    import gguf_mtp

    options = gguf_mtp.LoadOptions(n_ctx=160, n_seq=4, draft_min=2, draft_max=2, strict=True)
    with (
        gguf_mtp.load(demo_model(kind="f32"), options) as session,
        gguf_mtp.load(
            demo_model(kind="f32"), dataclasses.replace(options, n_seq=1, draft="off")
        ) as plain,
    ):
        known: dict[tuple[tuple[int, ...], int], list[int]] = {}

        def alone(prompt: Sequence[int], n: int) -> list[int]:
            key = (tuple(prompt), n)
            if key not in known:
                chunks = plain.engine.generate([prompt], GREEDY, n)
                known[key] = [t for chunk in chunks for t in chunk.tokens]
            return known[key]

        def prompt(rng: random.Random) -> list[int]:
            question = rng.choice(["What is the capital of France?", "Define brood.", "Hello"])
            return session.chat_tokens([{"role": "user", "content": question}])

        seed, end = 0, time.monotonic() + 60
        while time.monotonic() < end:
            storm = Storm(session.engine, alone, prompt, seed)
            storm.run(200)
            seed += 1
        assert seed > 1
