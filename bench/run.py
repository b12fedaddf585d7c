"""Tokens per second of one model, every way of drafting beside plain decoding.

The ways take turns within each round and each asks the same prompts, so that a drifting machine
meets all of them alike; ratios are taken within a round, then their median. Times are the engine's
own, from the first round of an answer to its last: reading prompts is left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ..loading.loader import LoadOptions, load
from ..offload.options import PlacementOptions
from ..params import RequestOptions, SamplingParams
from ..session import Session
from ..stats import Stats
from .replay import RecordedChain, Recording, replayed
from .workloads import Asked, Workload, workload


class BenchVariant(NamedTuple):
    """A way of decoding: plain, a fixed depth, or automatic. `draft` is as `--draft` takes it."""

    name: str
    draft: str
    draft_min: int
    draft_max: int | None
    draft_model: Path | None = None


PLAIN = BenchVariant("plain", "off", 0, 0)
AUTO = BenchVariant("auto", "auto", 0, None)


def fixed(depth: int) -> BenchVariant:
    """With the drafter that automatic drafting takes: an MTP block or stages, else copies."""
    return BenchVariant(f"depth {depth}", "auto", depth, depth)


def automatic(draft: str, draft_model: Path | None = None) -> BenchVariant:
    """Automatic depth with these drafters; `draft_model` where one of them is "model"."""
    uses_file = "model" in draft.split(",")
    return BenchVariant(draft, draft, 0, AUTO.draft_max, draft_model if uses_file else None)


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What to measure. Each round asks `n_prompts` prompts of each workload at each temperature, or
    replays as many `recordings` of each name in their stead, whole or to `n_tokens`."""

    ways: Sequence[BenchVariant] = (PLAIN, *map(fixed, (1, 2, 3, 4)), AUTO)
    workloads: Sequence[str] = ("definitions", "facts", "code", "repetition", "random")
    temperatures: Sequence[float] = (0.0, 0.7, 1.0)
    n_rounds: int = 5
    n_prompts: int = 2
    n_tokens: int = 64
    n_threads: int = 0
    n_ctx: int = 1024
    placement: PlacementOptions = field(default_factory=PlacementOptions)
    recordings: Sequence[Recording] = ()

    @property
    def most_tokens(self) -> int:
        """Of all answers together, the warm-up round's too."""
        n_cells = len(self.ways) * len(self.workloads) * len(self.temperatures)
        return n_cells * (self.n_rounds + 1) * self.n_prompts * self.n_tokens


@dataclass(slots=True)
class BenchCell:
    """One way on one workload at one temperature: a `Stats` for each counted round."""

    workload: str
    temperature: float
    way: str
    rounds: list[Stats] = field(default_factory=list)

    @property
    def speeds(self) -> list[float]:
        """Tokens per second, round by round."""
        return [s.tokens_per_s for s in self.rounds]

    @property
    def total(self) -> Stats:
        total = Stats()
        for one in self.rounds:
            total += one
        return total


def measure(
    path: Path, plan: BenchPlan, progress: Callable[[int, int], None] | None = None
) -> list[BenchCell]:
    """All cells of `plan` for the model at `path`, in the plan's order.

    One round more than asked is run first and not counted. Raises what `load` raises.
    """
    with ExitStack() as stack:
        sessions = {way: stack.enter_context(_open(path, way, plan)) for way in plan.ways}
        first = next(iter(sessions.values()))
        loads = (
            replayed(plan.recordings, first)
            if plan.recordings
            else [workload(name, first) for name in plan.workloads]
        )
        cells = {
            (w.name, t, way): BenchCell(w.name, t, way.name)
            for w in loads
            for t in plan.temperatures
            for way in plan.ways
        }
        n_total, n_done = len(cells) * (plan.n_rounds + 1), 0
        for index in range(plan.n_rounds + 1):
            for load_, t, way in _turns(plan, loads, index):
                stats = _ask(sessions[way], load_.of_round(index, plan.n_prompts), t, plan.n_tokens)
                if index > 0:
                    cells[load_.name, t, way].rounds.append(stats)
                n_done += 1
                if progress:
                    progress(n_done, n_total)
        return list(cells.values())


def ratios(cell: BenchCell, other: BenchCell) -> list[float]:
    """Speed over the other's, round by round."""
    return [a / b for a, b in zip(cell.speeds, other.speeds, strict=True)]


def median_ratio(cell: BenchCell, other: BenchCell) -> float:
    return statistics.median(ratios(cell, other))


def _turns(
    plan: BenchPlan, loads: Sequence[Workload], index: int
) -> Iterator[tuple[Workload, float, BenchVariant]]:
    """Every cell once; the ways begin one further in each round, so that none is always first."""
    shift = index % len(plan.ways)
    ways = [*plan.ways[shift:], *plan.ways[:shift]]
    for load_ in loads:
        for t in plan.temperatures:
            for way in ways:
                yield load_, t, way


def _open(path: Path, way: BenchVariant, plan: BenchPlan) -> Session:
    return load(
        path,
        LoadOptions(
            n_ctx=plan.n_ctx,
            n_threads=plan.n_threads,
            draft=way.draft,
            draft_min=way.draft_min,
            draft_max=way.draft_max,
            draft_model=way.draft_model,
            placement=plan.placement,
        ),
    )


def _ask(session: Session, asked: Sequence[Asked], temperature: float, n_tokens: int) -> Stats:
    total = Stats()
    params = SamplingParams(temperature=temperature, seed=1)
    for prompt, answer in asked:
        chain = RecordedChain(prompt, answer) if answer else None
        options = RequestOptions(chain=chain)
        for chunk in session.engine.generate([prompt], params, n_tokens, options):
            if chunk.stats:
                total += chunk.stats
    return total
