"""What a sampled answer's first tokens should be like, counted against what they were.

The exact law walks every prefix that can be drawn, one row at a time, with the samplers' definition
instead of the package's; the draws come from the engine, drafting, sixteen sequences at once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from gguf_mtp.errors import CannotRewind
from gguf_mtp.params import SamplingParams
from gguf_mtp.session import Session
from gguf_mtp.types import Decoder, Floats, Rows
from tests.support.sampling_reference import by_definition

END = -1
Cells = dict[tuple[int, ...], float]
"""The first tokens of an answer, and their probability; `END` stands for an end token."""


def exact_law(session: Session, prompt: Sequence[int], params: SamplingParams, n: int) -> Cells:
    """The joint law of the first `n` tokens. Strict settings: these rows are the engine's own."""
    target: Decoder = session.engine._target
    end_tokens = session.engine.limits.end_tokens
    laws: Cells = {}

    def walk(answer: tuple[int, ...], mass: float) -> None:
        if len(answer) == n or answer[-1:] == (END,):
            laws[answer] = laws.get(answer, 0.0) + mass
            return
        row = next_row(target, prompt, answer)
        for token, prob in by_definition(row, params, [*prompt, *answer]).items():
            walk((*answer, END if token in end_tokens else token), mass * prob)

    walk((), 1.0)
    target.rewind(0, 0)
    return laws


def next_row(target: Decoder, prompt: Sequence[int], answer: Sequence[int]) -> Floats:
    """The logits after prompt and answer; the prompt's rows are kept from call to call."""
    held = min(target.n_past(0), len(prompt) - 1)
    try:
        target.rewind(0, held)
    except CannotRewind:  # a cache of states: all is read again
        held = 0
        target.rewind(0, 0)
    rows = Rows(0, held, [*prompt, *answer][held:], 1)
    return target.decode([rows]).outputs[0].logits[0].copy()


def drawn(
    session: Session, prompt: Sequence[int], wishes: Sequence[SamplingParams], n: int
) -> Counter[tuple[int, ...]]:
    """The first `n` tokens of an answer under each of `wishes`."""
    engine, seen = session.engine, Counter()
    answers: dict[int, tuple[int, ...]] = {}
    for params in wishes:  # one more token than is counted, so that it may still be drafted
        answers[engine.submit(prompt, params, n + 1)] = ()
    while not engine.is_idle:
        for chunk in engine.step():
            answers[chunk.seq] += tuple(chunk.tokens)
            if chunk.finish_reason == "stop":
                answers[chunk.seq] += (END,)
            elif len(answers[chunk.seq]) >= n:
                engine.cancel(chunk.seq)
    for answer in answers.values():
        seen[answer[:n]] += 1
    return seen


def excess(seen: Counter[tuple[int, ...]], law: Cells) -> float:
    """Chi-square over what it may be at p = 0.001: above 1, `seen` does not follow `law`.

    Cells that fewer than 5 draws are expected of count as one. The bound is Wilson and Hilferty's.
    """
    n = sum(seen.values())
    if any(cell not in law for cell in seen):
        return math.inf
    expected = {cell: n * prob for cell, prob in law.items()}
    cells = [(seen[c], e) for c, e in expected.items() if e >= 5]
    rare = [(seen[c], e) for c, e in expected.items() if e < 5]
    if rare:
        cells.append((sum(s for s, _ in rare), sum(e for _, e in rare)))
    found = np.array(cells)
    total = float(((found[:, 0] - found[:, 1]) ** 2 / found[:, 1]).sum())
    dof = len(cells) - 1
    assert dof >= 10, f"only {dof} degrees of freedom: this law says little"
    spread = 2 / (9 * dof)
    return total / (dof * (1 - spread + 3.09 * math.sqrt(spread)) ** 3)
