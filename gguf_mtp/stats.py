"""Counts and times of answers: what a request reports, and what an engine adds up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Stats:
    """Counts and times of one request, or of several added up (`+=`). Times are wall clock, in
    seconds.

    A request's prompt counts as prefill except its last token, which the first round decodes.
    `judged_per_position[k]` drafts were judged at position k, and `accepted_per_position[k]` kept.
    """

    prefill_tokens: int = 0
    cached_tokens: int = 0
    prefill_s: float = 0.0
    decode_tokens: int = 0
    decode_s: float = 0.0
    rounds: int = 0
    drafted: int = 0
    judged_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)

    @property
    def accepted(self) -> int:
        return sum(self.accepted_per_position)

    def count_prompt(self, n_rows: int, seconds: float) -> None:
        self.prefill_tokens += n_rows
        self.prefill_s += seconds

    def count_round(
        self, n_committed: int, n_drafted: int, n_judged: int, n_accepted: int, seconds: float
    ) -> None:
        self.rounds += 1
        self.decode_tokens += n_committed
        self.decode_s += seconds
        self.drafted += n_drafted
        _add(self.judged_per_position, [1] * n_judged)
        _add(self.accepted_per_position, [1] * n_accepted)

    def __iadd__(self, other: Stats) -> Stats:
        for name in (
            "prefill_tokens",
            "cached_tokens",
            "prefill_s",
            "decode_tokens",
            "decode_s",
            "rounds",
            "drafted",
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        _add(self.judged_per_position, other.judged_per_position)
        _add(self.accepted_per_position, other.accepted_per_position)
        return self


def _add(total: list[int], more: Sequence[int]) -> None:
    """Adds per position; `total` grows where `more` is longer."""
    total += [0] * (len(more) - len(total))
    for k, n in enumerate(more):
        total[k] += n
