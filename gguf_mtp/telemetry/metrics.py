"""What drafting gains and what a server does, as numbers for Prometheus.

Counted on the engine's thread in plain numbers, as a round of a small model takes a quarter of a
millisecond, and put into Prometheus' form when somebody asks. Knows no HTTP. The names of
speculative decoding are vLLM's, after this project's prefix.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from gguf_mtp.depth import DepthReport
from gguf_mtp.engine.observers import Fallback, RoundReport, SequenceReport
from gguf_mtp.telemetry.histogram import DEPTHS, SECONDS, Histogram

__all__ = ["CONTENT_TYPE", "Answered", "Metrics", "Now"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "gguf_mtp:"
_ESTIMATE_S = 1.0
"""The depth decision is asked for its estimate so often at most."""


class Answered(NamedTuple):
    """One answer that has ended, as its client saw it. Times in seconds from the request's arrival;
    `first_s` None when it had no tokens."""

    finish: str
    n_tokens: int
    n_cached: int
    first_s: float | None
    seconds: float

    @property
    def per_token_s(self) -> float | None:
        """Seconds per token after the first."""
        if self.first_s is None or self.n_tokens < 2:
            return None
        return (self.seconds - self.first_s) / (self.n_tokens - 1)


class Now(NamedTuple):
    """What is so at this moment: answers in slots and before them, positions of the KV cache, and
    lines of logs and traces that were lost since the start."""

    n_running: int
    n_waiting: int
    n_cells: int
    n_lost_lines: int = 0


class Metrics:
    """Counts what an engine and a server do; a `engine.observers.Observer`.

    `round`, `fell_back` and `answered` are called on the engine's thread, the others from any.
    `estimate` asks the depth decision; it is called on the engine's thread too.
    """

    def __init__(self, estimate: Callable[[], DepthReport] | None = None) -> None:
        self._estimate = estimate
        self._lock = threading.Lock()
        self._asked_at = -1e9
        self._report: DepthReport | None = None
        self._n: Counter[str] = Counter()  # everything without a label
        self._drafts: Counter[str] = Counter()  # by source, as the next two
        self._drafted: Counter[str] = Counter()
        self._accepted: Counter[str] = Counter()
        self._judged_at: Counter[int] = Counter()  # by position
        self._accepted_at: Counter[int] = Counter()
        self._fallbacks: Counter[str] = Counter()
        self._finishes: Counter[str] = Counter()
        self._responses: Counter[int] = Counter()
        self._n_cells = 0
        self._depths = Histogram(DEPTHS)
        self._round_s = {
            (part, phase): Histogram(SECONDS)
            for part in ("target", "draft", "other")
            for phase in ("decode", "prefill")
        }
        self._first_s = Histogram(SECONDS)
        self._per_token_s = Histogram(SECONDS)
        self._seconds = Histogram(SECONDS)

    # -- counting --------------------------------------------------------------------------------

    def round(self, report: RoundReport) -> None:
        """See `engine.observers.Observer`."""
        phase = "prefill" if report.load.n_prefill else "decode"
        with self._lock:
            self._n["rounds"] += 1
            self._n["prefill_tokens"] += report.load.n_prefill
            self._n_cells = report.load.n_cells
            self._round_s["target", phase].add(report.target_s)
            self._round_s["draft", phase].add(report.draft_s)
            self._round_s["other", phase].add(report.other_s)
            for part in report.parts:
                self._count(part)
        if time.monotonic() - self._asked_at > _ESTIMATE_S:
            self._ask()

    def _count(self, part: SequenceReport) -> None:
        self._n["decode_tokens"] += part.n_committed
        self._depths.add(part.depth)
        if not part.n_drafted:
            return
        self._drafts[part.source] += 1
        self._drafted[part.source] += part.n_drafted
        self._accepted[part.source] += part.n_accepted
        for position in range(part.n_judged):
            self._judged_at[position] += 1
        for position in range(part.n_accepted):
            self._accepted_at[position] += 1
        if part.n_accepted < part.n_drafted:
            self._n["rewinds"] += 1
            self._n["rewound_tokens"] += part.n_drafted - part.n_accepted

    def fell_back(self, kind: Fallback, why: str) -> None:  # noqa: ARG002 - a label is one word
        """See `engine.observers.Observer`."""
        with self._lock:
            self._fallbacks[kind] += 1

    def answered(self, answer: Answered) -> None:
        """An answer has ended, whichever way."""
        with self._lock:
            self._finishes[answer.finish] += 1
            self._n["cached_tokens"] += answer.n_cached
            self._seconds.add(answer.seconds)
            if answer.first_s is not None:
                self._first_s.add(answer.first_s)
            if answer.per_token_s is not None:
                self._per_token_s.add(answer.per_token_s)
        self._ask()

    def responded(self, status: int) -> None:
        """An HTTP response has been sent."""
        with self._lock:
            self._responses[status] += 1

    def _ask(self) -> None:
        self._asked_at = time.monotonic()
        if self._estimate:
            self._report = self._estimate()

    # -- telling ---------------------------------------------------------------------------------

    def text(self, now: Now) -> bytes:
        """The exposition, of type `CONTENT_TYPE`."""
        registry = CollectorRegistry(auto_describe=False)
        with self._lock:
            families = [*self._counters(now), *self._gauges(now), *self._histograms()]
        registry.register(_Families(families))
        return generate_latest(registry)

    def _counters(self, now: Now) -> Iterator[Metric]:
        by_source = ["source"]
        yield _counter("spec_decode_num_drafts", "Drafts made.", self._drafts, by_source)
        yield _counter("spec_decode_num_draft_tokens", "Draft tokens.", self._drafted, by_source)
        yield _counter(
            "spec_decode_num_accepted_tokens", "Draft tokens accepted.", self._accepted, by_source
        )
        yield _counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens, by position in the draft.",
            {k: self._accepted_at[k] for k in self._judged_at},
            ["position"],
        )
        yield _counter(
            "spec_decode_num_judged_tokens_per_pos",
            "Draft tokens that the target judged, by position in the draft.",
            self._judged_at,
            ["position"],
        )
        for name, what in _PLAIN.items():
            yield _counter(name, what, {"": self._n[name]}, [])
        yield _counter(
            "fallbacks",
            "Times a drafter was disabled or idle prefixes were dropped.",
            {kind: self._fallbacks[kind] for kind in _KINDS},
            ["reason"],
        )
        lost = {"": now.n_lost_lines}
        yield _counter("lost_lines", "Log and trace lines that were not written.", lost, [])
        yield _counter("answers", "Answers that ended.", self._finishes, ["finish"])
        yield _counter("http_responses", "HTTP responses.", self._responses, ["status"])

    def _gauges(self, now: Now) -> Iterator[Metric]:
        yield _gauge("num_requests_running", "Requests that are being answered.", now.n_running)
        yield _gauge("num_requests_waiting", "Requests that wait for a slot.", now.n_waiting)
        yield _gauge("kv_cells_used", "KV cache cells in use, idle ones too.", self._n_cells)
        yield _gauge("kv_cells", "KV cache cells in total.", now.n_cells)
        report = self._report
        if report is None or report.plain_tokens_per_s is None:
            return
        yield _gauge(
            "estimated_plain_tokens_per_second",
            "Expected speed of one sequence without drafting.",
            report.plain_tokens_per_s,
        )
        yield _gauge("estimated_speed_up", "Expected gain by drafting.", report.speed_up)
        yield _gauge("estimated_depth", "Current draft depth for one sequence.", report.depth)

    def _histograms(self) -> Iterator[Metric]:
        for part, what in _PARTS.items():
            family = HistogramMetricFamily(f"{_PREFIX}round_{part}_seconds", what, labels=["phase"])
            for phase in ("decode", "prefill"):
                histogram = self._round_s[part, phase]
                family.add_metric([phase], histogram.buckets(), histogram.total)
            yield family
        for name, what, histogram in (
            ("draft_depth", "Draft tokens allowed per round.", self._depths),
            ("time_to_first_token_seconds", "From request to first token.", self._first_s),
            ("time_per_output_token_seconds", "After the first token.", self._per_token_s),
            ("answer_seconds", "From request to end of answer.", self._seconds),
        ):
            family = HistogramMetricFamily(f"{_PREFIX}{name}", what)
            family.add_metric([], histogram.buckets(), histogram.total)
            yield family


class _Families:
    """A `prometheus_client` collector of what is put together already."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


_PLAIN = {
    "rounds": "Target decodes.",
    "prefill_tokens": "Prompt tokens that were decoded.",
    "cached_tokens": "Prompt tokens found in the KV cache.",
    "decode_tokens": "Generated tokens.",
    "rewinds": "Drafts with rejected tokens.",
    "rewound_tokens": "Draft tokens that were not accepted.",
}
_PARTS = {
    "target": "Time of the target decode in a round.",
    "draft": "Time of drafting in a round.",
    "other": "Time of everything else in a round.",
}
_KINDS: tuple[Fallback, ...] = ("drafter_failed", "never_accepted", "cache_full")


def _counter(name: str, what: str, values: Mapping[Any, int], labels: Sequence[str]) -> Metric:
    family = CounterMetricFamily(_PREFIX + name, what, labels=labels)
    for label, value in sorted(values.items()):
        family.add_metric([str(label)] if labels else [], value)
    return family


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(_PREFIX + name, what, value)
