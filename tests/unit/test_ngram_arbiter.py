"""Free drafts beside others, in simulated engines: sent where they pay, never to anybody's harm.

Scores are true seconds and expected tokens, against a policy that knows everything: in every round
the best depth of the best drafter for the text at hand, its rebuilt graphs not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

import pytest

from gguf_mtp.depth import AutoDepth, DepthOptions, FixedDepth
from gguf_mtp.depth.drafter_selector import DrafterSelector
from gguf_mtp.depth.protocol import Depth, DraftRequest, DraftResult, FreeDraft, RoundFeedback
from gguf_mtp.types import DraftLimit
from tests.support.depth_bounds import CURVES, named
from tests.support.depth_sim import MAX_DEPTH, Curve, expected_tokens, falling
from tests.support.offers_sim import BLOCK, COPIER, Text, always, never, simulate_offers, spells

N_ROUNDS, N_SEEDS = 480, 3
GOOD = falling(0.8, 0.95)
TEXTS = {
    "chance only": Text(never),
    "a copy": Text(always),
    "passages": Text(spells),
    "a copy, block": Text(always, block=GOOD),
    "passages, block": Text(spells, block=GOOD),
    "passages, weak block": Text(spells, block=falling(0.3, 0.9)),
    "chance only, block": Text(never, block=GOOD),
}
SENDING = [named("flat"), named("linear"), named("not monotone"), named("graph reuse")]
TELLING = [named("a row costs a decode"), named("graph reuse, cheap rows")]


def best(world: Curve, text: Text, copies: bool) -> tuple[float, float]:
    """Tokens and seconds of the best choice for one kind of round."""
    choices = [(1.0, world.target[0])]
    for n in range(1, MAX_DEPTH + 1):
        if copies:
            choices.append((expected_tokens([text.copied] * n, n), world.target[n]))
        if text.block:
            choices.append((expected_tokens(text.block, n), world.seconds(1 + n, n)))
    return max(choices, key=lambda one: one[0] / one[1])


def ideal(world: Curve, text: Text) -> float:
    """Tokens per second of who knows everything."""
    rounds = [best(world, text, text.passage(i)) for i in range(N_ROUNDS)]
    return sum(tokens for tokens, _ in rounds) / sum(seconds for _, seconds in rounds)


def rates(
    make: Callable[[], Depth], world: Curve, text: Text, noise: float = 0.1
) -> tuple[float, float]:
    """Medians over seeds of tokens per second: of all rounds, and of the second half."""
    runs = [simulate_offers(make(), world, text, N_ROUNDS, (noise, s))[0] for s in range(N_SEEDS)]
    return median(t.rate() for t in runs), median(t.rate(N_ROUNDS // 2) for t in runs)


def check_never_slower(make: Callable[[], Depth], worlds: Sequence[Curve]) -> None:
    """Raises AssertionError for a policy slower than plain decoding, from the first round on."""
    for world in worlds:
        for name, text in TEXTS.items():
            of_plain = rates(make, world, text)[0] * world.target[0]
            assert of_plain > 0.96, f"{of_plain:.3f} of plain: {world.name}, {name}"


def check_sent_where_they_pay(make: Callable[[], Depth], worlds: Sequence[Curve]) -> None:
    """Raises AssertionError for a policy that leaves what a copy would gain."""
    for world in worlds:
        for name, text in TEXTS.items():
            of_ideal = rates(make, world, text)[1] / ideal(world, text)
            assert of_ideal > 0.92, f"{of_ideal:.3f} of the ideal: {world.name}, {name}"


def test_never_slower_than_plain() -> None:
    check_never_slower(AutoDepth, TELLING)


def test_as_fast_as_who_knows_everything() -> None:
    check_sent_where_they_pay(AutoDepth, SENDING[1:2])


@pytest.mark.slow
def test_the_whole_grid() -> None:
    check_never_slower(AutoDepth, CURVES)
    check_sent_where_they_pay(AutoDepth, SENDING)


class Eager:
    """A mutant: sends every offer whole."""

    n_max = n_max_free = MAX_DEPTH
    n_skip = 0

    def __init__(self) -> None:
        self.inner = AutoDepth()
        self.given_up = self.inner.given_up

    def choose(self, rooms: Sequence[DraftRequest]) -> list[DraftLimit]:
        limits = self.inner.choose(rooms)
        return [
            DraftLimit(len(room.free_draft.confidence), (), "free draft", room.free_draft.source)
            if room.free_draft
            else limit
            for room, limit in zip(rooms, limits, strict=True)
        ]

    def record(self, round_: RoundFeedback) -> None:
        self.inner.record(round_)

    def forget(self, seq: int) -> None:
        self.inner.forget(seq)


class Deaf(Eager):
    """A mutant: sends none."""

    def choose(self, rooms: Sequence[DraftRequest]) -> list[DraftLimit]:
        return self.inner.choose([replace_offer(room) for room in rooms])


def replace_offer(room: DraftRequest) -> DraftRequest:
    names = [name for name in room.drafters if name != COPIER]
    return DraftRequest(room.seq, room.n_max if names else 0, names)


def test_the_checks_find_mutants() -> None:
    with pytest.raises(AssertionError, match="of plain"):
        check_never_slower(Eager, TELLING)
    with pytest.raises(AssertionError, match="of the ideal"):
        check_sent_where_they_pay(Deaf, SENDING[1:2])


@pytest.mark.parametrize("world", SENDING[1::2], ids=lambda world: world.name)
def test_chance_offers_do_not_disturb_another_drafter(world: Curve) -> None:
    with_offers = rates(AutoDepth, world, TEXTS["chance only, block"])[0]
    without = rates(AutoDepth, world, replace(TEXTS["chance only, block"], chance_share=0.0))[0]
    assert with_offers > 0.97 * without


def test_each_drafter_works_where_it_is_best() -> None:
    _, who = simulate_offers(AutoDepth(), named("linear"), TEXTS["passages, block"], 480, (0.1, 1))
    in_passages = [name for i, name in enumerate(who) if spells(i) and i > 120]
    elsewhere = [name for i, name in enumerate(who) if not spells(i) and i > 120]
    assert in_passages.count(COPIER) > 0.9 * len(in_passages)
    assert elsewhere.count(BLOCK) > 0.9 * len(elsewhere)


def test_an_offer_not_sent_is_learned_from_all_the_same() -> None:
    depth = AutoDepth()
    offer = FreeDraft(COPIER, [0.9] * 4)
    for _ in range(40):
        depth.record(
            RoundFeedback(
                [], 1, 0, 9, 1.0, 0.0, 0.0, [DraftResult(0, offer.confidence, 1, 1, COPIER)]
            )
        )
    known = depth.arbiter.acceptance_of(COPIER)
    assert known.acceptance(0, offer.confidence)[0] > 0.9
    for _ in range(40):
        depth.record(
            RoundFeedback(
                [], 1, 0, 9, 1.0, 0.0, 0.0, [DraftResult(0, offer.confidence, 0, 1, COPIER)]
            )
        )
    assert known.acceptance(0, offer.confidence)[0] < 0.5
    # another sequence: what all have shown, without this one's bad record
    assert known.acceptance(0, offer.confidence)[0] < 0.6 * known.acceptance(1, offer.confidence)[0]


def test_a_longer_match_is_trusted_more() -> None:
    depth = AutoDepth()
    known = depth.arbiter.acceptance_of(COPIER)
    for _ in range(60):
        known.judge(DraftResult(0, [0.5], 0, 1, COPIER))
        known.judge(DraftResult(0, [0.92], 1, 1, COPIER))
    short, long = (known.acceptance(1, [sure])[0] for sure in (0.5, 0.92))
    assert short < 0.2
    assert long > 0.8


def test_the_bounds_of_a_draft_hold_for_offers() -> None:
    room = DraftRequest(0, 3, ["ngram"], FreeDraft("ngram", [0.9] * 6))
    assert FixedDepth(5).choose([room]) == [DraftLimit(3, source="ngram")]
    assert FixedDepth(2).choose([room]) == [DraftLimit(2, source="ngram")]
    first = DraftRequest(0, 8, ["mtp", "ngram"], FreeDraft("ngram", [0.9]))
    assert FixedDepth(5).choose([first]) == [DraftLimit(5, source="mtp")]
    assert FixedDepth(5).choose([DraftRequest(0, 8, [])]) == [DraftLimit(0)]


# -- two drafters that take time ---------------------------------------------------------------


def lead(profiles: dict[str, float], costs: dict[str, float], n_rounds: int = 1_500) -> list[str]:
    """Who drafted in each round; two drafters of one depth each, everything as expected."""
    depth, who = AutoDepth(), []
    total = dict.fromkeys(profiles, 0.0)
    for i in range(n_rounds):
        [limit] = depth.choose([DraftRequest(0, 8, list(profiles))])
        n = limit.n
        n_accepted = 0
        if n:
            total[limit.source] += profiles[limit.source]
            if total[limit.source] >= 1:
                n_accepted, total[limit.source] = n, total[limit.source] - 1
        judged = DraftResult(0, [0.5] * n, n_accepted, min(n_accepted + 1, n), limit.source)
        spent = {name: costs[name] * n * (name == limit.source) for name in profiles}
        target_s = 1 + 0.05 * n
        depth.record(
            RoundFeedback([judged], n + 1, 0, i, target_s, sum(spent.values()), 0.0, (), spent)
        )
        who.append(limit.source if n else "")
    return who


@pytest.mark.parametrize("better", ["mtp", "model"])
def test_the_better_of_two_leads_whatever_their_order(better: str) -> None:
    worse = {"mtp": "model", "model": "mtp"}[better]
    for order in ((better, worse), (worse, better)):
        who = lead({n: 0.9 if n == better else 0.3 for n in order}, dict.fromkeys(order, 0.05))
        assert who[500:].count(better) > 0.85 * len(who[500:]), order
        assert who.count(worse) >= 8, "never tried"


def test_of_equally_good_ones_the_cheaper_leads() -> None:
    who = lead({"mtp": 0.8, "model": 0.8}, {"mtp": 0.5, "model": 0.05})
    assert who[500:].count("model") > 0.85 * len(who[500:])


def test_a_contest_of_one_needs_no_trial() -> None:
    depth = AutoDepth()
    assert DrafterSelector().winner([depth.controller("mtp")], (0,), [[3]]) == 0


def test_who_copies_alone_leaves_no_other_drafter_behind() -> None:
    """Nothing is known of a drafter that there is not, and nothing of it is stored."""
    depth = AutoDepth()
    for i in range(20):
        depth.choose([DraftRequest(0, MAX_DEPTH, (), None)])
        depth.record(RoundFeedback([DraftResult(0, (), 0, 0)], 1, 0, i, 1.0, 0.0, 0.0))
    assert depth.n_skip > 0
    assert depth.controllers == {}


# -- long copies ---------------------------------------------------------------------------------

# T(m) / T(1) of a mixture of experts in Q8_0 on two cores, between those measured a line.
MEASURED = {
    1: 1.0, 2: 1.38, 3: 1.82, 4: 2.06, 5: 2.83, 8: 4.12, 9: 4.25, 16: 5.81, 17: 6.78, 32: 10.1,
    33: 11.3, 49: 16.1, 99: 32.5,
}  # fmt: skip


def experts(m: int) -> float:
    above = min(k for k in MEASURED if k >= m)
    below = max(k for k in MEASURED if k <= m)
    share = 0.0 if above == below else (m - below) / (above - below)
    return MEASURED[below] + share * (MEASURED[above] - MEASURED[below])


LONG = Curve("experts", tuple(experts(m) for m in range(1, 99)), rebuild=0.05)


def long_rate(longest: int, text: Text, seed: int) -> float:
    depth = AutoDepth(DepthOptions(free_max=longest))
    trace, _ = simulate_offers(depth, LONG, text, 400, (0.05, seed), longest)
    return trace.rate(100)


def test_long_copies_pay_where_short_ones_hardly_do() -> None:
    """A file that is written again with a change here and there."""
    text = Text(always, copied=0.99, match=30)
    long, short = (median(long_rate(n, text, seed) for seed in range(3)) for n in (48, 8))
    best_long = max(expected_tokens([0.99] * n, n) / experts(n + 1) for n in range(49))
    assert long > 1.25 * short
    assert long > 0.93 * best_long


def test_long_copies_of_chance_matches_do_no_harm() -> None:
    for text in (Text(never), Text(spells, copied=0.5, match=6)):
        long, short = (median(long_rate(n, text, seed) for seed in range(3)) for n in (48, 8))
        assert long > 0.98 * short


def test_a_decode_has_no_more_rows_than_there_is_room_for() -> None:
    depth = AutoDepth(DepthOptions(free_max=48, most_rows=64))
    offers = [DraftRequest(i, 48, [COPIER], FreeDraft(COPIER, [0.99] * 48)) for i in range(4)]
    most = 0
    for _ in range(120):
        limits = depth.choose(offers)
        n_rows = len(offers) + sum(limit.n for limit in limits)
        most = max(most, n_rows)
        judged = [
            DraftResult(i, [0.99] * limit.n, limit.n, limit.n, COPIER)
            for i, limit in enumerate(limits)
        ]
        seen = [DraftResult(i, [0.99] * 48, 48, 48, COPIER) for i in range(4)]
        depth.record(RoundFeedback(judged, n_rows, 0, 100, 1.0, 0.0, 0.0, seen, {COPIER: 0.0}))
    assert 40 < most <= 64
