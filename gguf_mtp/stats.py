"""Counts and times of answers: what a request reports, and what an engine adds up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple


class RoundCount(NamedTuple):
    """What one round did for one sequence. Times in seconds: of the whole round, of its target
    decode, and of its drafting; a batch's times count for each of its sequences. `source` drafted,
    where anything was."""

    n_committed: int
    n_drafted: int
    n_judged: int
    n_accepted: int
    seconds: float
    target_s: float
    draft_s: float
    source: str = ""


@dataclass(slots=True)
class Stats:
    """Counts and times of one request, or of several added up (`+=`). Times are wall clock, in
    seconds.

    A request's prompt counts as prefill except its last token. Where the decode that reads its end
    gives the first token too, in a round without a draft, that is one of `first_tokens`, and its
    time is in `prefill_s`.
    `judged_per_position[k]` drafts were judged at position k, and `accepted_per_position[k]` kept;
    `rounds_per_depth[n]` rounds drafted n tokens. `by_drafter` has, by its name, a drafter's
    numbers of drafts, of tokens drafted, and of tokens accepted. Of `decode_s`, `target_s` went
    into the target's decodes and `draft_s` into drafting.
    """

    prefill_tokens: int = 0
    cached_tokens: int = 0
    prefill_s: float = 0.0
    decode_tokens: int = 0
    first_tokens: int = 0
    decode_s: float = 0.0
    target_s: float = 0.0
    draft_s: float = 0.0
    rounds: int = 0
    drafted: int = 0
    judged_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    rounds_per_depth: list[int] = field(default_factory=list)
    by_drafter: dict[str, list[int]] = field(default_factory=dict)

    @property
    def accepted(self) -> int:
        return sum(self.accepted_per_position)

    @property
    def tokens_per_s(self) -> float:
        return (self.decode_tokens - self.first_tokens) / self.decode_s if self.decode_s else 0.0

    @property
    def tokens_per_round(self) -> float:
        return self.decode_tokens / self.rounds if self.rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    def count_prompt(self, n_rows: int, seconds: float) -> None:
        self.prefill_tokens += n_rows
        self.prefill_s += seconds

    def count_first(self, n_committed: int) -> None:
        """A round whose time was counted with the prompt."""
        self.first_tokens += n_committed
        self.count_round(RoundCount(n_committed, 0, 0, 0, 0.0, 0.0, 0.0))

    def count_round(self, count: RoundCount) -> None:
        self.rounds += 1
        self.decode_tokens += count.n_committed
        self.decode_s += count.seconds
        self.target_s += count.target_s
        self.draft_s += count.draft_s
        self.drafted += count.n_drafted
        _add(self.rounds_per_depth, [0] * count.n_drafted + [1])
        if count.n_drafted:
            _add(self.judged_per_position, [1] * count.n_judged)
            _add(self.accepted_per_position, [1] * count.n_accepted)
            drafted = [1, count.n_drafted, count.n_accepted]
            _add(self.by_drafter.setdefault(count.source, []), drafted)

    def __iadd__(self, other: Stats) -> Stats:
        for f in fields(self):
            mine, more = getattr(self, f.name), getattr(other, f.name)
            if isinstance(mine, list):
                _add(mine, more)
            elif isinstance(mine, dict):
                for name, counts in more.items():
                    _add(mine.setdefault(name, []), counts)
            else:
                setattr(self, f.name, mine + more)
        return self


def _add(total: list[int], more: Sequence[int]) -> None:
    """Adds per position; `total` grows where `more` is longer."""
    total += [0] * (len(more) - len(total))
    for k, n in enumerate(more):
        total[k] += n
