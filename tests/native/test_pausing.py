"""Depth 0 costs next to nothing, and drafting resumes as if it had never paused (demo model)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import gguf_mtp
from gguf_mtp.demo import demo_model
from gguf_mtp.depth.protocol import DraftRequest, RoundFeedback
from gguf_mtp.drafters.mtp import FLUSH
from gguf_mtp.params import SamplingParams
from gguf_mtp.session import Session
from gguf_mtp.types import Ask, Draft, DraftLimit

pytestmark = pytest.mark.native

GREEDY = SamplingParams(temperature=0)


class Told:
    """A depth decision that does as it is told."""

    def __init__(self, depth: int) -> None:
        self.depth, self.n_max, self.n_max_free = depth, 4, 4
        self.given_up: dict[str, str] = {}
        self.n_skip = 0

    def choose(self, rooms: Sequence[DraftRequest]) -> list[DraftLimit]:
        return [DraftLimit(min(self.depth, room.n_max), source="mtp") for room in rooms]

    def record(self, round_: RoundFeedback) -> None:
        """Nothing is learned."""

    def forget(self, seq: int) -> None:
        """Nothing is kept."""


def strict() -> Session:
    options = gguf_mtp.LoadOptions(n_ctx=2048, draft_min=4, draft_max=4, strict=True)
    return gguf_mtp.load(demo_model(kind="f32"), options)


def write(session: Session, depth: Told, n: int, max_rounds: int) -> list[int]:
    """Tokens of an answer that is left open after `n` of them, or after `max_rounds` rounds."""
    engine = session.engine
    engine.depth = depth
    engine.limits = engine.limits.__class__(2048, 1, 512, frozenset())
    prompt = session.chat_tokens([{"role": "user", "content": "Climate of France?"}])
    engine.submit(prompt, GREEDY, 2000 - len(prompt))
    tokens = list(prompt)
    for _ in range(max_rounds):
        if len(tokens) >= n:
            break
        for chunk in engine.step():
            tokens += chunk.tokens
    return tokens


def next_draft(session: Session, tokens: list[int]) -> Draft:
    [(slot, request)] = session.engine._slots.active()
    assert slot.tokens == tokens
    drafter = session.engine.drafting.drafter("mtp")
    assert drafter is not None
    [draft] = drafter.propose([Ask(0, tokens, DraftLimit(4), request.chain)])
    return draft


@pytest.mark.parametrize("n_rounds", [40, 300])
def test_the_first_draft_after_a_pause_is_that_of_a_run_without(n_rounds: int) -> None:
    with strict() as steady, strict() as paused:
        tokens = write(steady, Told(2), 1500, n_rounds)
        assert write(paused, Told(0), len(tokens), 2000) == tokens
        one, other = next_draft(steady, tokens), next_draft(paused, tokens)
        assert len(one.tokens) == 4
        assert one.tokens == other.tokens
        assert one.confidence == pytest.approx(other.confidence, abs=1e-4)


def test_a_pause_costs_one_mtp_decode_for_256_rows() -> None:
    with strict() as session:
        tokens = write(session, Told(0), 1000, 2000)
        mtp = session.engine.drafting.drafter("mtp")._context  # type: ignore[union-attr]
        assert mtp.n_decodes == (len(tokens) - 2) // FLUSH == 3
