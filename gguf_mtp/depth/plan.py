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


class Prices(NamedTuple):
    """Seconds: `target[m]` of a decode with m rows; `first` draft step, each `further` one, and each
    further `row` of a step; `idle` of a round without drafts."""

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


def gains(acceptance: Sequence[float], n: int) -> list[float]:
    """Probability that draft tokens 1..n are accepted: the running product of `acceptance`."""
    return list(accumulate(acceptance[:n], mul))


def growth(gain: Sequence[Sequence[float]], least: int) -> list[Item]:
    """All steps of growth, best first; `gain[i][k]`: expected tokens of sequence i's token k.

    A sequence's gains fall with its depth, so this order never takes a token before the one it
    follows. The first `least` tokens of a sequence come as one step, valued by their average.
    """
    items: list[Item] = []
    for who, tokens in enumerate(gain):
        if len(tokens) < least:
            continue
        block = max(least, 1)
        if tokens:
            items.append(Item(sum(tokens[:block]), who, block, block))
        items.extend(Item(tokens[k], who, k + 1, 1) for k in range(block, len(tokens)))
    if len(gain) > 1:
        items.sort(key=lambda item: item.tokens / item.rows, reverse=True)
    return items


def rates(items: Sequence[Item], n_seqs: int, prices: Prices) -> list[float]:
    """Expected tokens per second after the first 0, 1, ... steps of growth.

    Time: target[rows] plus, for each draft position, one step over the sequences that reach it.
    """
    tokens, rows = float(n_seqs), n_seqs
    drafting, deepest = 0.0, 0
    found = [tokens / (prices.target[rows] + prices.idle)]
    for gain, _, depth, more in items:
        tokens += gain
        rows += more
        if depth > deepest:
            drafting += (depth - deepest) * prices.further + (more - depth + deepest) * prices.row
            if deepest == 0:
                drafting += prices.first - prices.further
            deepest = depth
        else:
            drafting += more * prices.row
        found.append(tokens / (prices.target[rows] + drafting))
    return found


def rate_of(depths: Sequence[int], gain: Sequence[Sequence[float]], prices: Prices) -> float:
    """Expected tokens per second when sequence i drafts `depths[i]` tokens."""
    n_seqs, rows, deepest = len(depths), sum(depths), max(depths)
    tokens = n_seqs + sum(sum(one[:n]) for one, n in zip(gain, depths, strict=True))
    if deepest == 0:
        return tokens / (prices.target[n_seqs] + prices.idle)
    drafting = prices.first + (deepest - 1) * prices.further + (rows - deepest) * prices.row
    return tokens / (prices.target[n_seqs + rows] + drafting)


def depths_of(items: Sequence[Item], n_seqs: int) -> tuple[int, ...]:
    """The depth of each sequence after these steps of growth."""
    depths = [0] * n_seqs
    for item in items:
        depths[item.who] = item.depth
    return tuple(depths)
