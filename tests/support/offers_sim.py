"""Simulated engines in which some drafts are in hand: texts that repeat themselves now and then.

As `depth_sim`: a round's true time is what the curve says, plus the rebuild of the graph when its
row count differs from the round before; policies are scored by true seconds and expected tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from gguf_mtp.depth.protocol import Depth, DraftRequest, DraftResult, FreeDraft, RoundFeedback
from tests.support.depth_sim import MAX_DEPTH, Clock, Curve, Noise, Profile, Trace, expected_tokens

COPIER, BLOCK = "ngram", "mtp"


@dataclass(frozen=True)
class Text:
    """In one round of `spell` in two there is an offer: inside a passage that was there before, of
    matches of length `match` that come true with `copied`; else, now and then, a chance match of
    two tokens that comes true with `chance`. `block` is the acceptance of a drafter that takes
    time, None where there is none."""

    passage: Callable[[int], bool]
    copied: float = 0.97
    match: int = 12
    chance: float = 0.1
    chance_share: float = 0.5
    block: Profile | None = None

    def offer(self, i: int, rng: random.Random) -> tuple[int, float] | None:
        """Length of the match, and the acceptance of each of its tokens."""
        if self.passage(i):
            return self.match, self.copied
        return (2, self.chance) if rng.random() < self.chance_share else None


def always(_: int) -> bool:
    return True


def never(_: int) -> bool:
    return False


def spells(i: int) -> bool:
    """Forty rounds in every hundred and twenty."""
    return i % 120 >= 80


def simulate_offers(
    depth: Depth,
    world: Curve,
    text: Text,
    n_rounds: int,
    noise: Noise,
    longest: int = MAX_DEPTH,
) -> tuple[Trace, list[str]]:
    """One sequence, offered copies of `longest` tokens; the trace, and who drafted in each
    round."""
    clock = Clock(*noise)
    rng, trace, who, last_rows = clock.rng, Trace(), [], 0
    for i in range(n_rounds):
        found = text.offer(i, rng)
        offer = _offer(found[0], longest) if found else None
        names = [COPIER] * bool(offer) + [BLOCK] * (text.block is not None)
        limit = depth.choose([DraftRequest(0, longest if names else 0, names, offer)])[0]
        n = limit.n
        odds = [found[1]] * longest if found else []
        profile = odds if limit.source == COPIER else (text.block or ())
        came_true = next((k for k, p in enumerate(odds) if rng.random() >= p), len(odds))
        n_accepted = (
            min(came_true, n)
            if limit.source == COPIER
            else next((k for k in range(n) if rng.random() >= profile[k]), n)
        )
        target_s = world.target[n] + (world.rebuild if n + 1 != last_rows else 0.0)
        last_rows = n + 1
        draft_s = world.step * n if limit.source == BLOCK else 0.0
        spell = clock.spell()
        confidence = offer.confidence[:n] if limit.source == COPIER and offer else [0.5] * n
        judged = DraftResult(0, confidence, n_accepted, min(n_accepted + 1, n), limit.source)
        spent = draft_s * spell * clock.blur()
        depth.record(
            RoundFeedback(
                [judged],
                n + 1,
                0,
                i,
                target_s * spell * clock.blur(),
                spent,
                0.0,
                _compared(offer, came_true, n_accepted + 1),
                {BLOCK: spent, COPIER: 0.0},
            )
        )
        trace.depths.append(n)
        trace.seconds.append(target_s + draft_s)
        trace.tokens.append(expected_tokens(profile, n))
        who.append(limit.source if n else "")
    return trace, who


def _offer(match: int, longest: int) -> FreeDraft:
    return FreeDraft(COPIER, [1 - 1 / (match + k) for k in range(longest)])


def _compared(offer: FreeDraft | None, came_true: int, n_committed: int) -> list[DraftResult]:
    """The offer against what the round committed: a token, or more where a draft was accepted."""
    if offer is None:
        return []
    n = min(len(offer.confidence), n_committed)
    n_same = min(came_true, n)
    return [DraftResult(0, offer.confidence, n_same, min(n_same + 1, n), offer.source)]
