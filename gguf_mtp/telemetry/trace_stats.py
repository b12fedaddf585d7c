"""A trace in figures: speed and depth over time, acceptance by position, where the time went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from gguf_mtp.telemetry.trace import Moment, Recording

__all__ = ["AcceptanceSummary", "Bin", "Summary", "acceptance", "bins", "summary"]


class Bin(NamedTuple):
    """What happened between two moments.

    `tokens_per_s` of all sequences together, over the time that rounds took; `depth`: tokens
    drafted for a sequence in a round, on average. None where nothing was decoded.
    """

    tokens_per_s: float | None
    depth: float | None


class AcceptanceSummary(NamedTuple):
    """Of `n_judged` tokens at one position of drafts, `n_accepted` were accepted."""

    n_judged: int
    n_accepted: int

    @property
    def rate(self) -> float:
        return self.n_accepted / self.n_judged if self.n_judged else 0.0


class Summary(NamedTuple):
    """Sums over a trace. `busy_s` is the time within rounds; `reasons` counts, for sequences and
    rounds, why they drafted as far as they did."""

    n_rounds: int
    n_requests: int
    n_prefill: int
    n_tokens: int
    n_drafted: int
    n_accepted: int
    target_s: float
    draft_s: float
    other_s: float
    reasons: Counter[str]
    sources: Counter[str]

    @property
    def busy_s(self) -> float:
        return self.target_s + self.draft_s + self.other_s


def summary(recording: Recording) -> Summary:
    reports = [moment.report for moment in recording.moments]
    parts = [part for report in reports for part in report.parts]
    sources: Counter[str] = Counter()
    for part in parts:
        sources[part.source] += part.n_accepted
    return Summary(
        n_rounds=len(reports),
        n_requests=len({part.request for part in parts}),
        n_prefill=sum(report.load.n_prefill for report in reports),
        n_tokens=sum(part.n_committed for part in parts),
        n_drafted=sum(part.n_drafted for part in parts),
        n_accepted=sum(part.n_accepted for part in parts),
        target_s=sum(report.target_s for report in reports),
        draft_s=sum(report.draft_s for report in reports),
        other_s=sum(report.other_s for report in reports),
        reasons=Counter(part.reason for part in parts if part.reason),
        sources=sources,
    )


def bins(moments: Sequence[Moment], n_bins: int) -> list[Bin]:
    """The trace's time in `n_bins` equal pieces; a round counts where it ended."""
    if not moments:
        return []
    start = moments[0].t - moments[0].report.seconds
    width = (moments[-1].t - start) / n_bins or 1.0
    pieces: list[list[Moment]] = [[] for _ in range(n_bins)]
    for moment in moments:
        pieces[min(int((moment.t - start) / width), n_bins - 1)].append(moment)
    return [_bin(piece) for piece in pieces]


def _bin(moments: Sequence[Moment]) -> Bin:
    parts = [part for moment in moments for part in moment.report.parts]
    if not parts:
        return Bin(None, None)
    seconds = sum(moment.report.seconds for moment in moments)
    n_tokens = sum(part.n_committed for part in parts)
    depth = sum(part.n_drafted for part in parts) / len(parts)
    return Bin(n_tokens / seconds if seconds > 0 else None, depth)


def acceptance(moments: Sequence[Moment]) -> list[AcceptanceSummary]:
    """By position in the draft, the first at index 0."""
    judged: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    for moment in moments:
        for part in moment.report.parts:
            judged.update(range(part.n_judged))
            accepted.update(range(part.n_accepted))
    return [AcceptanceSummary(judged[k], accepted[k]) for k in range(len(judged))]
