"""Random life of an engine: on decoders without a model, and on the demo model."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gguf_mtp.demo import demo_model
from gguf_mtp.depth import FixedDepth
from gguf_mtp.depth.protocol import Depth, DraftRequest, RoundFeedback
from gguf_mtp.drafters.draft_model import ModelDrafter
from gguf_mtp.drafters.dspark import DsparkDrafter
from gguf_mtp.drafters.mtp import MtpDrafter
from gguf_mtp.drafters.ngram import NgramDrafter
from gguf_mtp.engine.engine import Engine
from gguf_mtp.gguf.arch.dflash import BlockShape
from gguf_mtp.types import Drafter, DraftLimit
from tests.support.fakes import N_VOCAB, FakeBlocks, FakeMtp, FakeTarget
from tests.support.storm import GREEDY, Storm
from tests.unit.test_engine import NO_END, greedy

SHAPE = BlockShape(4, FakeBlocks.MASK, (1,))
FOUR = dataclasses.replace(NO_END, n_seq=4, n_ctx=64, n_batch=24)
LINEUPS = ["mtp", "ngram", "model", "dspark", "ngram,mtp", "ngram,dspark", "model,mtp,ngram"]


class Whim:
    """Lets anybody draft anything that is allowed."""

    def __init__(self, n_max: int, seed: int) -> None:
        self.n_max = self.n_max_free = n_max
        self.given_up: dict[str, str] = {}
        self.n_skip = 0
        self.rng = random.Random(seed)
        self.n_offers = 0
        self.n_accepted = 0

    def choose(self, rooms: Sequence[DraftRequest]) -> list[DraftLimit]:
        return [self._limit(room) for room in rooms]

    def _limit(self, room: DraftRequest) -> DraftLimit:
        if not room.drafters:
            return DraftLimit(0)
        source = self.rng.choice(list(room.drafters))
        most = min(room.n_max, self.n_max)
        if room.free_draft and source == room.free_draft.source:
            most = min(most, len(room.free_draft.confidence))
        return DraftLimit(self.rng.randint(0, most), source=source)

    def record(self, round_: RoundFeedback) -> None:
        """An offer that was sent is judged by comparison as by the target."""
        for offer in round_.free_drafts:
            assert offer.n_accepted <= offer.n_judged <= len(offer.confidence)
            [sent] = [j for j in round_.judged if j.seq == offer.seq]
            if sent.source == offer.source:
                assert offer.n_accepted >= sent.n_accepted
                assert offer.n_judged >= sent.n_judged
                self.n_offers += 1
                self.n_accepted += sent.n_accepted

    def forget(self, seq: int) -> None:
        """Nothing is kept."""


def drafters_of(lineup: str) -> list[Drafter]:
    made: dict[str, Drafter] = {
        "mtp": MtpDrafter(FakeMtp(4, n_batch=24), 4, 24),
        "ngram": NgramDrafter(4),
        "dspark": DsparkDrafter(FakeBlocks(4, n_batch=24), 4, 24, SHAPE),
        "model": ModelDrafter(FakeTarget(4, n_batch=24), 24),
    }
    return [made[name] for name in lineup.split(",")]


def fake_prompt(rng: random.Random) -> list[int]:
    """Some end as they began, with the answer between: the fake's law then repeats it."""
    prompt = [rng.randrange(N_VOCAB) for _ in range(rng.choice([1, 2, 6, 45]))]
    if rng.random() < 0.5:
        return prompt
    return [*prompt[-2:], *greedy(prompt, 15), *prompt[-2:]]


def storm_on_fakes(seed: int, lineup: str, depth: Depth, n_steps: int) -> Storm:
    target = FakeTarget(4, n_batch=24)
    storm = Storm(Engine(target, drafters_of(lineup), depth, FOUR), greedy, fake_prompt, seed)
    storm.run(n_steps)
    for batch in target.batches:
        assert sum(len(r.tokens) for r in batch) <= 24
    return storm


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), lineup=st.sampled_from(LINEUPS), n=st.sampled_from([0, 1, 2, 5]))
def test_any_order_of_events(seed: int, lineup: str, n: int) -> None:
    storm_on_fakes(seed, lineup, FixedDepth(n), 40)


@pytest.mark.parametrize("lineup", LINEUPS)
def test_any_mixture_of_drafters(lineup: str) -> None:
    whim = Whim(5, 1)
    storm = storm_on_fakes(1, lineup, whim, 1_500)
    assert storm.n_finished > 40
    assert (whim.n_offers > 20) == ("ngram" in lineup)
    assert (whim.n_accepted > 10) == ("ngram" in lineup)


@pytest.mark.slow
@pytest.mark.parametrize("lineup", LINEUPS)
@pytest.mark.parametrize("n", [0, 1, 2, 5])
def test_ten_thousand_events(lineup: str, n: int) -> None:
    assert storm_on_fakes(n, lineup, FixedDepth(n), 5_000).n_finished > 500
    assert storm_on_fakes(n, lineup, Whim(n, n), 5_000).n_finished > 500


@pytest.mark.slow
@pytest.mark.native
@pytest.mark.parametrize("lineup", ["mtp", "ngram,mtp", "model,mtp,ngram"])
def test_half_a_minute_on_the_demo_model(lineup: str, tmp_path: Path) -> None:
    import gguf_mtp
    from gguf_mtp.bench.shallow import shallow_copy

    file = None
    if "model" in lineup:
        file = shallow_copy(demo_model(kind="f32"), tmp_path / "shallow.gguf", range(5))
    options = gguf_mtp.LoadOptions(
        n_ctx=160,
        n_seq=4,
        draft=lineup,
        draft_model=file,
        draft_min=2,
        draft_max=2,
        strict=True,
    )
    with (
        gguf_mtp.load(demo_model(kind="f32"), options) as session,
        gguf_mtp.load(
            demo_model(kind="f32"),
            dataclasses.replace(options, n_seq=1, draft="off", draft_model=None),
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

        session.engine.depth = Whim(2, 0)
        seed, end = 0, time.monotonic() + 30
        while time.monotonic() < end:
            storm = Storm(session.engine, alone, prompt, seed)
            storm.run(200)
            seed += 1
        assert seed > 1
