"""The sampling chain by its definition: one full, sorted list of tokens, one sampler at a time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from gguf_mtp.params import SamplingParams


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x.astype(np.float64) - x.max())
    return e / e.sum()


def by_definition(
    logits: np.ndarray,
    p: SamplingParams,
    history: Sequence[int] = (),
    mask: np.ndarray | None = None,
) -> dict[int, float]:
    """Token to probability. `history`: all tokens before this one."""
    row = logits.astype(np.float64)
    for token, bias in p.logit_bias:
        row[token] += bias
    if mask is not None:
        row[~mask] = -math.inf
    cells = [(i, row[i]) for i in range(len(row)) if row[i] > -math.inf]
    for sampler in p.samplers:
        cells = _apply(sampler, cells, p, history)
    probs = softmax(np.array([x for _, x in cells]))
    return {i: prob for (i, _), prob in zip(cells, probs, strict=True)}


def _apply(
    sampler: str, cells: list[tuple[int, float]], p: SamplingParams, history: Sequence[int]
) -> list[tuple[int, float]]:
    if sampler == "penalties":
        return _penalties(cells, p, history)
    cells = sorted(cells, key=lambda c: (-c[1], c[0]))
    probs = softmax(np.array([x for _, x in cells]))
    if sampler == "top_k" and p.top_k:
        return cells[: p.top_k]
    if sampler == "top_p" and p.top_p < 1:
        return _until(cells, probs, lambda total: total >= p.top_p)
    if sampler == "min_p" and p.min_p:
        return [c for c, prob in zip(cells, probs, strict=True) if prob >= p.min_p * probs[0]]
    if sampler == "typ_p" and p.typical_p < 1:
        entropy = -sum(q * math.log(q) for q in probs if q)
        far = [abs(-math.log(q) - entropy) if q else math.inf for q in probs]
        order = sorted(range(len(cells)), key=lambda i: far[i])
        return _until([cells[i] for i in order], probs[order], lambda total: total > p.typical_p)
    if sampler == "temperature":
        return [(i, x / p.temperature) for i, x in cells] if p.temperature else cells[:1]
    return cells


def _penalties(
    cells: list[tuple[int, float]], p: SamplingParams, history: Sequence[int]
) -> list[tuple[int, float]]:
    if p.repeat_last_n == 0:
        return cells
    counts = Counter(history if p.repeat_last_n == -1 else list(history)[-p.repeat_last_n :])
    out = []
    for i, x in cells:
        if counts[i]:
            x = x * p.repeat_penalty if x <= 0 else x / p.repeat_penalty
            x -= counts[i] * p.frequency_penalty + p.presence_penalty
        out.append((i, x))
    return out


def _until(cells: list, probs: np.ndarray, is_enough) -> list:  # type: ignore[no-untyped-def]
    total = 0.0
    for n, prob in enumerate(probs, 1):
        total += prob
        if is_enough(total):
            return cells[:n]
    return cells
