"""What the metrics count: against runs whose counts are known."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from gguf_mtp.depth import DepthReport
from gguf_mtp.engine.observers import EngineLoad, RoundReport, SequenceReport
from gguf_mtp.telemetry.histogram import Histogram
from gguf_mtp.telemetry.metrics import Answered, Metrics, Now
from tests.support.fakes import FakeMtp, FakeTarget
from tests.unit.test_engine import NO_END, collect, engine_of

NOW = Now(n_running=1, n_waiting=2, n_cells=300)


def values(metrics: Metrics, now: Now = NOW) -> dict[str, float]:
    """Samples by name and labels, without the prefix, as Prometheus itself reads them."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics.text(now).decode()):
        assert family.documentation
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            name = sample.name.removeprefix("gguf_mtp:")
            assert name != sample.name
            found[f"{name}{{{labels}}}" if labels else name] = sample.value
    return found


def drafting(n_drafted: int, n_judged: int, n_accepted: int, n_committed: int) -> SequenceReport:
    return SequenceReport(1, 4, "", "mtp", n_drafted, n_judged, n_accepted, n_committed)


def test_rounds_by_hand() -> None:
    metrics = Metrics()
    metrics.round(RoundReport([], EngineLoad(7, 7, 0), 0.3, 0.0, 0.01))
    metrics.round(RoundReport([drafting(3, 2, 1, 2)], EngineLoad(0, 9, 0), 0.02, 0.004, 0.001))
    metrics.round(
        RoundReport(
            [
                drafting(2, 2, 2, 3),
                SequenceReport(2, 0, "measured", "", 0, 0, 0, 1),
                SequenceReport(3, 9, "", "ngram", 8, 1, 0, 1),
            ],
            EngineLoad(0, 15, 0),
            0.04,
            0.006,
            0.002,
        )
    )
    metrics.fell_back("cache_full", "the cache was full")
    found = values(metrics)
    expected = {
        "spec_decode_num_drafts_total{source=mtp}": 2,
        "spec_decode_num_drafts_total{source=ngram}": 1,
        "spec_decode_num_draft_tokens_total{source=mtp}": 5,
        "spec_decode_num_draft_tokens_total{source=ngram}": 8,
        "spec_decode_num_accepted_tokens_total{source=mtp}": 3,
        "spec_decode_num_accepted_tokens_total{source=ngram}": 0,
        "spec_decode_num_accepted_tokens_per_pos_total{position=0}": 2,
        "spec_decode_num_accepted_tokens_per_pos_total{position=1}": 1,
        "spec_decode_num_judged_tokens_per_pos_total{position=0}": 3,
        "spec_decode_num_judged_tokens_per_pos_total{position=1}": 2,
        "rounds_total": 3,
        "prefill_tokens_total": 7,
        "decode_tokens_total": 7,
        "rewinds_total": 2,
        "rewound_tokens_total": 10,
        "fallbacks_total{reason=cache_full}": 1,
        "fallbacks_total{reason=drafter_failed}": 0,
        "fallbacks_total{reason=never_accepted}": 0,
        "kv_cells_used": 15,
        "kv_cells": 300,
        "num_requests_running": 1,
        "num_requests_waiting": 2,
        "round_target_seconds_count{phase=prefill}": 1,
        "round_target_seconds_sum{phase=prefill}": 0.3,
        "round_target_seconds_count{phase=decode}": 2,
        "round_target_seconds_sum{phase=decode}": 0.06,
        "round_target_seconds_bucket{le=0.025,phase=decode}": 1,
        "round_target_seconds_bucket{le=0.05,phase=decode}": 2,
        "round_draft_seconds_sum{phase=decode}": 0.01,
        "round_other_seconds_sum{phase=decode}": 0.003,
        "draft_depth_count": 4,
        "draft_depth_sum": 17,
        "draft_depth_bucket{le=0}": 1,
        "draft_depth_bucket{le=4}": 3,
        "draft_depth_bucket{le=+Inf}": 4,
    }
    assert {name: round(found[name], 9) for name in expected} == expected


def test_answers_by_hand() -> None:
    metrics = Metrics()
    metrics.answered(Answered("stop", n_tokens=5, n_cached=3, first_s=0.2, seconds=0.6))
    metrics.answered(Answered("length", n_tokens=1, n_cached=0, first_s=0.1, seconds=0.1))
    metrics.answered(Answered("cancelled", n_tokens=0, n_cached=4, first_s=None, seconds=2.0))
    for status in (200, 200, 400):
        metrics.responded(status)
    found = values(metrics, NOW._replace(n_lost_lines=6))
    expected = {
        "answers_total{finish=stop}": 1,
        "answers_total{finish=length}": 1,
        "answers_total{finish=cancelled}": 1,
        "cached_tokens_total": 7,
        "http_responses_total{status=200}": 2,
        "http_responses_total{status=400}": 1,
        "lost_lines_total": 6,
        "time_to_first_token_seconds_count": 2,
        "time_to_first_token_seconds_sum": 0.3,
        "time_per_output_token_seconds_count": 1,
        "time_per_output_token_seconds_sum": 0.1,
        "answer_seconds_count": 3,
        "answer_seconds_sum": 2.7,
    }
    assert {name: round(found[name], 9) for name in expected} == expected


def test_an_engines_run_is_counted_to_the_token() -> None:
    limits = dataclasses.replace(NO_END, n_seq=2)
    target = FakeTarget(2)
    engine = engine_of(target, 3, limits, FakeMtp(2))
    metrics = Metrics()
    engine.observers.add(metrics)
    collect(engine, [[3, 1, 4, 1, 5], [2, 7], [1, 8, 2]], 25)
    found, totals = values(metrics), engine.totals
    assert found["rounds_total"] == len(target.batches)
    assert found["decode_tokens_total"] == totals.decode_tokens == 75
    assert found["prefill_tokens_total"] == totals.prefill_tokens == 4 + 1 + 2
    assert found["spec_decode_num_draft_tokens_total{source=mtp}"] == totals.drafted > 0
    assert found["spec_decode_num_accepted_tokens_total{source=mtp}"] == totals.accepted > 0
    for name, counts in (
        ("accepted", totals.accepted_per_position),
        ("judged", totals.judged_per_position),
    ):
        assert [
            found[f"spec_decode_num_{name}_tokens_per_pos_total{{position={k}}}"] for k in range(3)
        ] == counts
    assert found["draft_depth_count"] == totals.rounds
    assert found["spec_decode_num_drafts_total{source=mtp}"] == sum(totals.rounds_per_depth[1:])
    # Every refused token was a row that the cache had to drop.
    assert found["rewound_tokens_total"] == totals.drafted - totals.accepted
    assert found["kv_cells_used"] == engine._slots.n_cells()


def test_the_depth_decisions_estimate() -> None:
    reports = [
        DepthReport(None, 0, 1.0, (), "not yet"),
        DepthReport(40.0, 2, 1.5, (0.9,), None),
    ]
    metrics = Metrics(lambda: reports.pop(0))
    report = RoundReport([drafting(3, 2, 1, 2)], EngineLoad(0, 9, 0), 0.02, 0.0, 0.0)
    for _ in range(5):
        metrics.round(report)  # within a second: asked once
    assert "estimated_speed_up" not in values(metrics)
    metrics.answered(Answered("stop", 5, 3, 0.2, 0.6))
    found = values(metrics)
    assert found["estimated_plain_tokens_per_second"] == 40.0
    assert found["estimated_speed_up"] == 1.5
    assert found["estimated_depth"] == 2


def test_apps_do_not_share_metrics() -> None:
    first, second = Metrics(), Metrics()
    first.responded(200)
    assert "http_responses_total{status=200}" in values(first)
    assert "http_responses_total{status=200}" not in values(second)


def test_a_histogram_counts_each_value_where_it_belongs() -> None:
    histogram = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 5.0):
        histogram.add(value)
    assert histogram.buckets() == [("0.1", 2.0), ("1", 3.0), ("+Inf", 4.0)]
    assert histogram.total == 5.65


def test_the_document_names_every_metric() -> None:
    metrics = Metrics(lambda: DepthReport(40.0, 2, 1.5, (0.9,), None))
    metrics.answered(Answered("stop", 5, 3, 0.2, 0.6))
    families = text_string_to_metric_families(metrics.text(NOW).decode())
    names = {
        f.name.removeprefix("gguf_mtp:") + ("_total" if f.type == "counter" else "")
        for f in families
    }
    document = (Path(__file__).parents[2] / "docs" / "SERVER.md").read_text(encoding="utf-8")
    [table] = re.findall(r"\| Metric \|.*?\n\n", document, re.S)
    cells = [line.split(" | ")[0] for line in table.splitlines()[2:]]
    assert {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)} == names
