"""Which sequences draft how far: the depths with the most expected tokens per second.

Goodput as in SmartSpec/TurboSpec (arXiv 2406.14066): expected committed tokens over measured time,
depth 0 among the choices. A draft of depth N with conditional acceptances a_j commits

    1 + sum_{k<=N} prod_{j<=k} a_j

tokens on average (the target's own token is the 1). Pure functions of numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

Depths = tuple[int, ...]


class StepCosts(NamedTuple):
    """Seconds: `target[m]` of a decode with m rows; the `first` draft step, each `further` one, and
    each further `row` of a step; `idle` of a round without drafts."""

    target: Sequence[float]
    first: float
    further: float
    row: float
    idle: float


class Item(NamedTuple):
    """One step of growth: `rows` more draft tokens for the sequence with index `who`, up to depth
    `depth`, expected to commit `tokens` more."""

    tokens: float
    who: int
    depth: int
    rows: int


class DepthChoice(NamedTuple):
    """Draft depths by sequence, and their expected tokens per second."""

    depths: Depths
    rate: float


class GoodputEstimate(NamedTuple):
    """One estimate of everything, for sequences that may draft up to `room[i]` tokens.

    `acceptance[i][k]` is conditional, `gain[i][k]` the expected tokens of draft token k; `rates[k]`
    are tokens per second after the first k of `items`.
    """

    room: Sequence[int]
    acceptance: Sequence[Sequence[float]]
    gain: Sequence[Sequence[float]]
    prices: StepCosts
    items: Sequence[Item]
    rates: Sequence[float]

    @property
    def plain(self) -> float:
        """Seconds of a round without drafts."""
        return self.prices.target[len(self.room)] + self.prices.idle

    def depths(self, k: int) -> Depths:
        """The depth of each sequence after the first `k` steps of growth."""
        depths = [0] * len(self.room)
        for item in self.items[:k]:
            depths[item.who] = item.depth
        return tuple(depths)

    def tokens(self, depths: Depths) -> float:
        return len(depths) + sum(sum(g[:n]) for g, n in zip(self.gain, depths, strict=True))

    def seconds(self, depths: Depths) -> float:
        return self.prices.target[len(depths) + sum(depths)] + self.drafting(depths)

    def drafting(self, depths: Sequence[int]) -> float:
        """Seconds of making drafts of these depths."""
        deepest = max(depths)
        _, first, further, row, idle = self.prices
        if deepest == 0:
            return idle
        return first + (deepest - 1) * further + (sum(depths) - deepest) * row

    def rate_of(self, depths: Depths) -> float:
        return self.tokens(depths) / self.seconds(depths)

    def fits(self, depths: Depths) -> bool:
        return len(depths) == len(self.room) and all(map(int.__le__, depths, self.room))

    def best(self, most: int) -> int:
        """How many steps of growth give the highest rate with at most `most` draft rows."""
        rows, k = 0, 0
        for i, item in enumerate(self.items, 1):
            rows += item.rows
            if rows > most:
                break
            if self.rates[i] > self.rates[k]:
                k = i
        return k


def estimate_goodput(
    acceptance: Sequence[Sequence[float]], room: Sequence[int], prices: StepCosts, least: int
) -> GoodputEstimate:
    """Everything that follows from acceptances and prices; a draft has `least` tokens or none."""
    gain = [list(accumulate(one[:n], mul)) for one, n in zip(acceptance, room, strict=True)]
    items = growth(gain, least)
    return GoodputEstimate(room, acceptance, gain, prices, items, rates(items, len(room), prices))


def growth(gain: Sequence[Sequence[float]], least: int) -> list[Item]:
    """All steps of growth, best first.

    A sequence's gains fall with its depth, so this order never takes a token before the one it
    follows. The first `least` tokens of a sequence come as one step, valued by their average.
    """
    items: list[Item] = []
    block = max(least, 1)
    for who, tokens in enumerate(gain):
        if len(tokens) < block:
            continue
        items.append(Item(sum(tokens[:block]), who, block, block))
        items.extend([Item(tokens[k], who, k + 1, 1) for k in range(block, len(tokens))])
    if len(gain) > 1:
        items.sort(key=lambda item: item.tokens / item.rows, reverse=True)
    return items


def rates(items: Sequence[Item], n_seqs: int, prices: StepCosts) -> list[float]:
    """Expected tokens per second after the first 0, 1, ... steps of growth.

    Time: target[rows] plus, for each draft position, one step over the sequences that reach it.
    """
    target, first, further, row, idle = prices
    tokens, rows = float(n_seqs), n_seqs
    drafting, deepest = 0.0, 0
    found = [tokens / (target[rows] + idle)]
    for gain, _, depth, more in items:
        tokens += gain
        rows += more
        if depth > deepest:
            drafting += (depth - deepest) * further + (more - depth + deepest) * row
            if deepest == 0:
                drafting += first - further
            deepest = depth
        else:
            drafting += more * row
        found.append(tokens / (target[rows] + drafting))
    return found
