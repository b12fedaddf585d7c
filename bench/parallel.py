"""Several sequences at once: aggregate speed by width, plain and automatic; the cost of idle slots.

Every sequence writes the same number of tokens (end tokens do not end it), so that all run together
until the first is done; time is taken from when all prompts are read to the last token.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ..loading.loader import LoadOptions, load
from ..params import SamplingParams
from ..session import Session
from .run import AUTO, PLAIN, BenchVariant
from .workloads import workload

GREEDY = SamplingParams(temperature=0)


class ParallelRun(NamedTuple):
    """One batch of answers: tokens of all sequences, wall seconds, and rounds."""

    n_tokens: int
    seconds: float
    n_rounds: int

    @property
    def tokens_per_s(self) -> float:
        return self.n_tokens / self.seconds


@dataclass(slots=True)
class Width:
    """`n_seq` sequences decoded one way: a `ParallelRun` for each counted round."""

    n_seq: int
    way: str
    runs: list[ParallelRun] = field(default_factory=list)

    @property
    def aggregate(self) -> float:
        """Median tokens per second of all sequences together."""
        return statistics.median(run.tokens_per_s for run in self.runs)


def measure_widths(
    path: Path,
    widths: Sequence[int],
    n_rounds: int,
    n_tokens: int = 64,
    progress: Callable[[int, int], None] | None = None,
) -> list[Width]:
    """Plain and automatic decoding of `path` at each width, taking turns; a first round is not
    counted."""
    cells: dict[tuple[int, BenchVariant], Width] = {}
    for n_seq in widths:  # one width after the other: each needs contexts of its own
        with ExitStack() as stack:
            sessions = {
                way: stack.enter_context(_open(path, way, n_seq, n_tokens)) for way in (PLAIN, AUTO)
            }
            prompts = workload("facts", sessions[PLAIN])
            for index in range(n_rounds + 1):
                for way, session in sessions.items():
                    run = _together(
                        session, [one.prompt for one in prompts.of_round(index, n_seq)], n_tokens
                    )
                    cell = cells.setdefault((n_seq, way), Width(n_seq, way.name))
                    if index > 0:
                        cell.runs.append(run)
            if progress:
                progress(list(widths).index(n_seq) + 1, len(widths))
    return list(cells.values())


def idle_cost(path: Path, n_idle: int, n_held: int, n_rounds: int) -> float:
    """Seconds per round of one sequence beside `n_idle` idle ones that hold `n_held` tokens each,
    over its seconds alone: the median of paired ratios."""
    ratios = []
    options = LoadOptions(n_ctx=n_held + 256, n_seq=n_idle + 1, draft="off")
    with load(path, options) as session:
        engine = session.engine
        prompt = workload("facts", session).prompts[0]
        noise = workload("random", session).prompts
        for index in range(n_rounds + 1):
            engine._slots.evict_idle()
            alone = _together(session, [prompt], 64)
            for i in range(n_idle):
                long = [t for p in [*noise[i:], *noise[:i]] for t in p][:n_held]
                list(engine.generate([long], GREEDY, 1))
            beside = _together(session, [prompt], 64)
            if index > 0:
                ratios.append(beside.seconds / alone.seconds)
    return statistics.median(ratios)


def _open(path: Path, way: BenchVariant, n_seq: int, n_tokens: int) -> Session:
    session = load(
        path,
        LoadOptions(
            n_ctx=256 + n_tokens,
            n_seq=n_seq,
            draft=way.draft,
            draft_min=way.draft_min,
            draft_max=way.draft_max,
            draft_model=way.draft_model,
        ),
    )
    limits = session.engine.limits
    session.engine.limits = dataclasses.replace(limits, end_tokens=frozenset())
    return session


def _together(session: Session, prompts: Sequence[Sequence[int]], n_tokens: int) -> ParallelRun:
    engine = session.engine
    waiting = {engine.submit(p, GREEDY, n_tokens) for p in prompts}
    start, n_done, n_rounds = 0.0, 0, 0
    while not engine.is_idle:
        chunks = engine.step()
        waiting -= {chunk.seq for chunk in chunks if chunk.tokens}
        if start:
            n_done += sum(len(chunk.tokens) for chunk in chunks)
            n_rounds += 1
        elif not waiting:  # every sequence has written its first tokens
            start = time.perf_counter()
    return ParallelRun(n_done, time.perf_counter() - start, n_rounds)
