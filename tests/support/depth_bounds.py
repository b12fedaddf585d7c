"""What a depth policy is held to in simulated engines, and the worlds it is tried in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

from gguf_mtp.depth.protocol import Depth
from tests.support.depth_sim import (
    MAX_DEPTH,
    Curve,
    Profile,
    Trace,
    best_fixed,
    curve,
    expected_tokens,
    falling,
    fixed_rate,
    simulate,
)

CURVES = [
    curve("flat", lambda m: 1 + 0.02 * (m - 1)),
    curve("linear", lambda m: 1 + 0.3 * (m - 1)),
    curve("a row costs a decode", lambda m: 1 + 0.9 * (m - 1)),
    curve("threefold at 2 rows", lambda m: 1.0 if m == 1 else 3 + 0.05 * (m - 2), step=0.05),
    curve("not monotone", lambda m: (1, 1.6, 2, 1.5, 1.6, 2.2, 2.3, 1.9)[m - 1] if m < 9 else 2.0),
    curve("experts", lambda m: m**0.75),
    curve("graph reuse", lambda m: 1 + 0.15 * (m - 1), rebuild=0.39),
    curve("graph reuse, cheap rows", lambda m: 1 + 0.05 * (m - 1), step=0.05, rebuild=0.39),
]
PROFILES = [
    falling(0.0, 1.0),
    falling(0.2, 0.9),
    falling(0.4, 0.9),
    falling(0.6, 0.9),
    falling(0.75, 0.95),
    falling(0.85, 0.95),
    falling(0.93, 0.98),
    falling(0.98, 1.0),
]
TOLERANCE = 0.01  # by which the median over the seeds may miss a bound in any cell
LEARNING = 30  # rounds


def named(name: str) -> Curve:
    return next(one for one in CURVES if one.name == name)


class Score(NamedTuple):
    """Medians over seeds: against the best fixed depth after `LEARNING` rounds, against plain from
    the first round on, and the share of time lost to probes."""

    of_best: float
    of_plain: float
    lost: float


def score(world: Curve, profile: Profile, traces: Sequence[Trace]) -> Score:
    best, plain = best_fixed(world, profile), fixed_rate(world, profile, 0)
    return Score(
        median(trace.rate(LEARNING) / best for trace in traces),
        median(trace.rate() / plain for trace in traces),
        median(sum(trace.probe_loss) / sum(trace.seconds) for trace in traces),
    )


def stationary(
    make: Callable[[], Depth], world: Curve, profile: Profile, noise: float, n_seeds: int
) -> Score:
    """400 rounds of a text that does not change."""
    seeds = range(n_seeds)
    runs = [simulate(make(), world, lambda _: profile, 400, (noise, seed)) for seed in seeds]
    return score(world, profile, runs)


def interrupted(make: Callable[[], Depth], world: Curve, profile: Profile, n_seeds: int) -> Score:
    """The same on a machine where, half the time, another program makes everything 1.7 times as
    slow: a probe may meet another machine than the rounds before it."""
    seeds = range(n_seeds)
    runs = [simulate(make(), world, lambda _: profile, 400, (0.07, seed, 1.7)) for seed in seeds]
    return score(world, profile, runs)


def check_stationary(
    make: Callable[[], Depth],
    cells: Sequence[tuple[Curve, Profile, float]],
    n_seeds: int,
) -> None:
    """Raises AssertionError for a policy slower than plain, or than the best fixed depth."""
    n_short = 0
    for world, profile, noise in cells:
        of_best, of_plain, lost = stationary(make, world, profile, noise, n_seeds)
        where = f"{world.name}, acceptance {profile[0]}, noise {noise}"
        assert of_best >= 0.97 - TOLERANCE, f"{of_best:.3f} of the best depth: {where}"
        assert of_plain >= 0.98 - TOLERANCE, f"{of_plain:.3f} of plain: {where}"
        assert lost <= 0.02, f"{lost:.4f} of the time lost to probes: {where}"
        n_short += of_best < 0.97 or of_plain < 0.98
    assert n_short <= max(1, 0.1 * len(cells)), f"{n_short} of {len(cells)} cells miss a bound"


def regimes(
    make: Callable[[], Depth],
    world: Curve,
    profiles: Sequence[Profile],
    noise: float,
    n_seeds: int,
) -> tuple[float, float]:
    """Acceptance switches every 200 rounds. Medians over seeds: against the best single fixed depth
    over the run, and the worst 400 rounds against plain."""
    n_rounds = 1200
    of = [profiles[i // 200 % len(profiles)] for i in range(n_rounds)]
    fixed = max(
        sum(expected_tokens(one, n) for one in of) / (n_rounds * world.seconds(1 + n, n))
        for n in range(MAX_DEPTH + 1)
    )
    against_best, against_plain = [], []
    for seed in range(n_seeds):
        trace = simulate(make(), world, of.__getitem__, n_rounds, (noise, seed))
        against_best.append(trace.rate() / fixed)
        worst = min(trace.rate(i, i + 400) for i in range(0, n_rounds - 399, 50))
        against_plain.append(worst * world.target[0])
    return median(against_best), median(against_plain)
