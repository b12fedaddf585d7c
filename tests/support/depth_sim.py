"""A simulated engine for depth decisions: true costs and acceptances, noisy clocks, honest scores.

No model. A round's true time is what the curve says, plus the graph rebuild when its row count
differs from the round before. The controller sees it through a noisy clock; a policy is scored by
true seconds and by *expected* tokens, so that the luck of a short run does not count.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gguf_mtp.depth.controller import AutoDepth
from gguf_mtp.depth.protocol import Depth, DraftRequest, DraftResult, RoundFeedback, SkippedRounds

MAX_DEPTH = 8
Profile = Sequence[float]


@dataclass(frozen=True)
class Curve:
    """Seconds: `target[m - 1]` of a decode with m rows, `step` of a draft step (`is_block`: of a
    draft), `rebuild` when the number of rows changed; the very first draft takes `warm_up` more."""

    name: str
    target: tuple[float, ...]
    step: float = 0.1
    rebuild: float = 0.0
    is_block: bool = False
    warm_up: float = 0.0

    def seconds(self, n_rows: int, n_steps: int) -> float:
        return self.target[n_rows - 1] + self.drafting(n_steps)

    def drafting(self, n_tokens: int) -> float:
        return self.step * (min(n_tokens, 1) if self.is_block else n_tokens)


def curve(name: str, law: Callable[[int], float], step: float = 0.1, rebuild: float = 0.0) -> Curve:
    return Curve(name, tuple(law(m) for m in range(1, 1 + 2 * (1 + MAX_DEPTH) * 4)), step, rebuild)


def falling(first: float, fall: float) -> Profile:
    """Acceptance at positions 1..8: `first`, each further one `fall` times the one before."""
    return tuple(first * fall**j for j in range(MAX_DEPTH))


def expected_tokens(profile: Profile, n: int) -> float:
    total, product = 1.0, 1.0
    for a in profile[:n]:
        product *= a
        total += product
    return total


def fixed_rate(world: Curve, profile: Profile, n: int) -> float:
    return expected_tokens(profile, n) / world.seconds(1 + n, n)


def best_fixed(world: Curve, profile: Profile) -> float:
    return max(fixed_rate(world, profile, n) for n in range(MAX_DEPTH + 1))


class Clock:
    """Measured over true seconds: scatter of relative deviation `sigma`; on a machine that others
    use too, spells of some dozen rounds in which everything takes `busy` times as long; and at the
    very first, rounds that take `cold` times as long, one after the other."""

    def __init__(
        self, sigma: float, seed: int, busy: float = 1.0, cold: Sequence[float] = ()
    ) -> None:
        self.rng = random.Random(seed)
        self.sigma, self.busy = sigma, busy
        self.is_busy = False
        self.cold = list(cold)

    def spell(self) -> float:
        """The factor on this round's target and draft times."""
        if self.cold:
            return self.cold.pop(0)
        if self.busy > 1 and self.rng.random() < 0.06:
            self.is_busy = not self.is_busy
        return self.busy if self.is_busy else 1.0

    def blur(self) -> float:
        return math.exp(self.rng.gauss(0.0, self.sigma)) if self.sigma else 1.0


Noise = (  # arguments of a Clock
    tuple[float, int] | tuple[float, int, float] | tuple[float, int, float, Sequence[float]]
)


@dataclass
class Trace:
    """One entry per round: depth, true seconds, expected tokens, and what each probe round lost
    against the depth that it interrupted, in true seconds."""

    depths: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    probe_loss: list[float] = field(default_factory=list)

    def see(self, depth: int, seconds: float, tokens: float) -> None:
        self.depths.append(depth)
        self.seconds.append(seconds)
        self.tokens.append(tokens)

    def rate(self, start: int = 0, end: int | None = None) -> float:
        return sum(self.tokens[start:end]) / sum(self.seconds[start:end])


def simulate(
    depth: Depth,
    world: Curve,
    profiles: Callable[[int], Profile],
    n_rounds: int,
    noise: Noise,
    most_rest: int = 0,
) -> Trace:
    """One sequence for `n_rounds`; `profiles(round)`; `noise`: see `Clock`. Where nobody drafts, up
    to `most_rest` rounds pass without a decision."""
    clock = Clock(*noise)
    rng = clock.rng
    trace, last_rows = Trace(), 0
    room = [DraftRequest(0, MAX_DEPTH)]
    rested: list[float] = []
    n_resting = 0
    for i in range(n_rounds):
        profile = profiles(i)
        n_resting -= 1
        if n_resting >= 0:
            rested.append(world.target[0] * clock.spell() * clock.blur())
            trace.see(0, world.target[0], 1.0)
            continue
        n = depth.choose(room)[0].n
        n_resting = min(depth.n_skip, most_rest)
        probe = depth.prober.probe if isinstance(depth, AutoDepth) else None
        target_s = world.target[n] + (world.rebuild if n + 1 != last_rows else 0.0)
        last_rows = n + 1
        is_first = n > 0 and not any(trace.depths)
        draft_s = world.drafting(n) + (world.warm_up if is_first else 0.0)
        n_accepted = 0
        while n_accepted < n and rng.random() < profile[n_accepted]:
            n_accepted += 1
        judged = DraftResult(0, [0.5] * n, n_accepted, min(n_accepted + 1, n))
        spell = clock.spell()
        measured = target_s * spell * clock.blur(), draft_s * spell * clock.blur()
        passed = SkippedRounds(1, rested) if rested else None
        depth.record(RoundFeedback([judged], n + 1, 0, i, *measured, 0.0, skipped=passed))
        rested = []
        trace.see(n, target_s + draft_s, expected_tokens(profile, n))
        if probe is not None:
            instead = fixed_rate(world, profile, probe.instead.depths[0])
            lost = trace.seconds[-1] - trace.tokens[-1] / instead
            trace.probe_loss.append(lost)
    return trace


# -- confidence --------------------------------------------------------------------------------

TokenLaw = Callable[[int, random.Random], tuple[float, float]]


def telling(position: int, rng: random.Random) -> tuple[float, float]:
    """Easy and hard tokens, told apart by the confidence: (acceptance, confidence)."""
    easy = rng.random() < 0.7
    p = (0.97 if easy else 0.25) * 0.98**position
    return p, min(max((0.93 if easy else 0.45) + rng.gauss(0.0, 0.05), 0.0), 1.0)


def silent(position: int, rng: random.Random) -> tuple[float, float]:
    """The same tokens, but confidence says nothing about them."""
    p, _ = telling(position, rng)
    return p, rng.random()


def law_profile(law: TokenLaw, n: int = 4_000) -> Profile:
    rng = random.Random(1)
    return tuple(sum(law(j, rng)[0] for _ in range(n)) / n for j in range(MAX_DEPTH))


def easy(share: float) -> TokenLaw:
    """A text with this share of easy tokens; the confidence tells them apart, but not surely."""

    def law(position: int, rng: random.Random) -> tuple[float, float]:
        is_easy = rng.random() < share
        p = (0.95 if is_easy else 0.4) * 0.98**position
        return p, min(max((0.93 if is_easy else 0.45) + rng.gauss(0.0, 0.15), 0.0), 1.0)

    return law


def simulate_tokens(
    depth: Depth, world: Curve, law: TokenLaw, n_rounds: int, noise: Noise
) -> Trace:
    """One sequence whose draft tokens differ: acceptance and confidence come from `law`, positions
    independent. A draft ends where a limit says so; the step that was cut off is paid for."""
    clock = Clock(*noise)
    rng = clock.rng
    trace, last_rows = Trace(), 0
    for i in range(n_rounds):
        limit = depth.choose([DraftRequest(0, MAX_DEPTH)])[0]
        odds: list[float] = []
        confidence: list[float] = []
        n_steps = 0
        while len(odds) < limit.n:
            n_steps += 1
            p, value = law(len(odds), rng)
            if len(odds) < len(limit.p_min) and value < limit.p_min[len(odds)]:
                break
            odds.append(p)
            confidence.append(value)
        n = len(odds)
        target_s = world.target[n] + (world.rebuild if n + 1 != last_rows else 0.0)
        last_rows = n + 1
        draft_s = world.step * n_steps
        n_accepted = 0
        while n_accepted < n and rng.random() < odds[n_accepted]:
            n_accepted += 1
        spell = clock.spell()
        measured = target_s * spell * clock.blur(), draft_s * spell * clock.blur()
        judged = DraftResult(0, confidence, n_accepted, min(n_accepted + 1, n))
        depth.record(RoundFeedback([judged], n + 1, 0, i, *measured, 0.0))
        trace.see(n, target_s + draft_s, expected_tokens(odds, n))
    return trace


# -- several sequences -------------------------------------------------------------------------


def seconds_of(world: Curve, depths: Sequence[int]) -> float:
    """All rows in one decode; a draft step per position, a tenth of it per further row."""
    rows, steps = len(depths) + sum(depths), max(depths)
    return world.target[rows - 1] + world.step * (steps + 0.1 * (sum(depths) - steps))


def uniform_rate(world: Curve, profiles: Sequence[Profile], n: int) -> float:
    tokens = sum(expected_tokens(profile, n) for profile in profiles)
    return tokens / seconds_of(world, [n] * len(profiles))


def simulate_batch(
    depth: Depth,
    world: Curve,
    profiles: Sequence[Profile],
    n_rounds: int,
    noise: Noise,
) -> Trace:
    """As many sequences as profiles, in one batch."""
    clock = Clock(*noise)
    rng = clock.rng
    trace, last_rows = Trace(), 0
    rooms = [DraftRequest(seq, MAX_DEPTH) for seq in range(len(profiles))]
    for i in range(n_rounds):
        depths = [limit.n for limit in depth.choose(rooms)]
        rows = len(depths) + sum(depths)
        seconds = seconds_of(world, depths)
        draft_s = seconds - world.target[rows - 1]
        target_s = seconds - draft_s + (world.rebuild if rows != last_rows else 0.0)
        last_rows = rows
        judged = []
        for seq, n in enumerate(depths):
            n_accepted = 0
            while n_accepted < n and rng.random() < profiles[seq][n_accepted]:
                n_accepted += 1
            judged.append(DraftResult(seq, [0.5] * n, n_accepted, min(n_accepted + 1, n)))
        spell = clock.spell()
        measured = target_s * spell * clock.blur(), draft_s * spell * clock.blur()
        depth.record(RoundFeedback(judged, rows, 0, i, *measured, 0.0))
        tokens = sum(expected_tokens(p, n) for p, n in zip(profiles, depths, strict=True))
        trace.see(sum(depths), target_s + draft_s, tokens)
    return trace
