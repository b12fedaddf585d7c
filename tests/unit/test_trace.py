"""Traces: written, read back, and drawn."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gguf_mtp.cli.app import app
from gguf_mtp.cli.charts import bar, columns
from gguf_mtp.cli.trace import drawn
from gguf_mtp.engine.observers import EngineLoad, RoundReport, SequenceReport
from gguf_mtp.errors import GgufMtpError
from gguf_mtp.telemetry.trace import Moment, Recording, Trace, read
from gguf_mtp.telemetry.trace_stats import Bin, acceptance, bins, summary
from tests.support.fakes import FakeTarget
from tests.unit.test_engine import collect, engine_of

ABOUT = {"model": "demo", "n_ctx": 64, "n_seq": 1, "depth_max": 3}


def part(
    depth: int, n_drafted: int, n_judged: int, n_accepted: int, request: int = 1
) -> SequenceReport:
    source = "mtp" if n_drafted else ""
    return SequenceReport(
        request, depth, "measured", source, n_drafted, n_judged, n_accepted, n_accepted + 1
    )


def moment(t: float, *parts: SequenceReport, seconds: float = 0.1, n_prefill: int = 0) -> Moment:
    report = RoundReport(parts, EngineLoad(n_prefill, 5, 0), seconds / 2, seconds / 4, seconds / 4)
    return Moment(t, report)


MOMENTS = [
    moment(1.0, seconds=1.0, n_prefill=40),
    moment(1.1, part(2, 2, 2, 2)),
    moment(1.2, part(2, 2, 1, 0)),
    moment(2.0, part(0, 0, 0, 0), part(3, 3, 2, 1, request=2)),
]


def write(path: Path, *records: Mapping[str, Any] | str) -> Path:
    lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_what_is_read_is_what_the_engine_reported(tmp_path: Path) -> None:
    records: list[Mapping[str, Any]] = []
    engine = engine_of(FakeTarget(), 3)
    engine.observers.add(Trace(records.append, ABOUT))
    reports: list[RoundReport] = []

    class Keeping:
        def round(self, report: RoundReport) -> None:
            reports.append(report)

        def fell_back(self, kind: str, why: str) -> None:
            raise AssertionError((kind, why))

    engine.observers.add(Keeping())
    collect(engine, [[3, 1, 4, 1, 5]], 20)
    recording = read(write(tmp_path / "trace", *records))
    assert recording.about.items() >= ABOUT.items()
    assert len(recording.moments) == len(reports) > 4
    for found, report in zip(recording.moments, reports, strict=True):
        assert (found.report.parts, found.report.load) == (report.parts, report.load)
        assert found.report.seconds == pytest.approx(report.seconds, abs=2e-6)
    assert recording.n_torn == 0
    times = [m.t for m in recording.moments]
    assert 0 <= times[0] < times[-1] < 60


def test_a_fallback_is_a_line(tmp_path: Path) -> None:
    records: list[Mapping[str, Any]] = []
    trace = Trace(records.append, ABOUT)
    trace.fell_back("cache_full", "the KV cache was full")
    [(t, why)] = read(write(tmp_path / "trace", *records)).fallbacks
    assert (0 <= t < 60, why) == (True, "the KV cache was full")


def test_a_torn_last_line_is_left_out_and_said(tmp_path: Path) -> None:
    records: list[Mapping[str, Any]] = []
    trace = Trace(records.append, ABOUT)
    for m in MOMENTS:
        trace.round(m.report)
    whole = [json.dumps(r) for r in records]
    recording = read(write(tmp_path / "trace", *whole[:-1], whole[-1][:30]))
    assert (len(recording.moments), recording.n_torn) == (3, 1)
    assert "1 incomplete line was skipped" in list(drawn(recording, 80))


def begun(started: str) -> dict[str, Any]:
    return {"gguf_mtp_trace": 1, "started": started, **ABOUT}


def lines_of(*moments: Moment) -> list[dict[str, Any]]:
    records: list[Any] = []
    trace = Trace(records.append, ABOUT)
    for one in moments:
        trace.round(one.report)
    return [r | {"t": m.t} for r, m in zip(records[1:], moments, strict=True)]


def test_an_engine_that_was_started_again_goes_on_in_the_same_trace(tmp_path: Path) -> None:
    """Its clock and its requests are counted on; what the first one was killed over is left out."""
    rounds = lines_of(*MOMENTS)
    torn = json.dumps(rounds[0])[:30]
    path = write(
        tmp_path / "trace",
        *(begun("2026-11-29T23:59:55Z"), *rounds, torn),
        *(begun("2026-11-30T00:00:05Z"), *rounds, {"t": 3.0, "fallback": "x", "why": "full"}),
    )
    recording = read(path)
    assert [m.t for m in recording.moments] == [1.0, 1.1, 1.2, 2.0, 11.0, 11.1, 11.2, 12.0]
    assert [[p.request for p in m.report.parts] for m in recording.moments] == [
        *([], [1], [1], [1, 2]),
        *([], [4], [4], [4, 5]),
    ]
    assert recording.fallbacks == [(13.0, "full")]
    assert (recording.n_starts, recording.n_torn) == (2, 1)
    assert recording.about["started"] == "2026-11-29T23:59:55Z"
    shown = list(drawn(recording, 80))
    assert "the engine was started 2 times" in shown
    assert "1 incomplete line was skipped" in shown


def test_a_clock_that_was_set_back_does_not_turn_a_trace_around(tmp_path: Path) -> None:
    rounds = lines_of(*MOMENTS)
    early, late = "2026-11-30T00:00:05Z", "2026-11-30T00:09:05Z"
    recording = read(write(tmp_path / "trace", begun(late), *rounds, begun(early), *rounds))
    assert [m.t for m in recording.moments] == [1.0, 1.1, 1.2, 2.0, 3.0, 3.1, 3.2, 4.0]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "is not a gguf-mtp trace"),
        (["[1]"], "is not a gguf-mtp trace"),
        (["not JSON"], "is not a gguf-mtp trace"),
        (['{"gguf_mtp_trace": 7}'], "has trace version 7, but only 1 is supported"),
        (['{"gguf_mtp_trace": 1}', "{}", "{}"], "line 2 is not a round of a trace"),
        (['{"gguf_mtp_trace": 1}', "5", "{}"], "line 2 is not a round of a trace"),
        (['{"gguf_mtp_trace": 1}', '{"gguf_mtp_trace": 7}'], "has trace version 7, but only 1"),
    ],
)
def test_what_is_no_trace_is_one_sentence(tmp_path: Path, lines: list[str], message: str) -> None:
    path = write(tmp_path / "trace", *lines)
    with pytest.raises(GgufMtpError) as refusal:
        read(path)
    assert message in str(refusal.value)
    assert str(path) in str(refusal.value)


def test_a_file_without_end_is_not_read_to_it() -> None:
    with pytest.raises(GgufMtpError, match="is not a gguf-mtp trace"):
        read(Path("/dev/zero"))


def test_a_missing_and_a_binary_file(tmp_path: Path) -> None:
    with pytest.raises(GgufMtpError, match="No such file or directory"):
        read(tmp_path / "nowhere")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(GgufMtpError, match="it is not text"):
        read(tmp_path / "binary")


def test_bins_add_up_rates_over_the_time_of_rounds() -> None:
    found = bins(MOMENTS, 4)  # from 0.0 to 2.0, half a second each
    assert found[0] == Bin(None, None)  # the prompt ended in the second piece... of its own
    assert found[1] == Bin(None, None)
    assert found[2].tokens_per_s == pytest.approx((3 + 1) / (1.0 + 0.1 + 0.1))
    assert found[2].depth == 2.0
    assert found[3].tokens_per_s == pytest.approx((1 + 2) / 0.1)
    assert found[3].depth == 1.5
    assert bins([], 4) == []


def test_acceptance_by_position() -> None:
    assert acceptance(MOMENTS) == [(3, 2), (2, 1)]


def test_a_summary_adds_everything_up() -> None:
    total = summary(Recording(ABOUT, MOMENTS, [], 0))
    assert total.n_rounds == 4
    assert total.n_requests == 2
    assert (total.n_prefill, total.n_tokens) == (40, 7)
    assert (total.n_drafted, total.n_accepted) == (7, 3)
    assert total.sources["mtp"] == 3
    assert total.reasons == {"measured": 4}
    assert total.target_s == pytest.approx(0.65)
    assert total.busy_s == pytest.approx(1.3)


def test_columns_are_as_high_as_their_values() -> None:
    assert columns([0.0, 25.0, 50.0, None, 100.0], 2, "/s") == [
        "100 /s ┤   █"[:8] + "    █",
        "     0 ┤▁▄█ █",
    ]
    assert columns([], 2, "")[0] == "1  ┤"
    assert columns([0.0123], 2, "")[0] == "0.013  ┤█"[:8] + "▇"


@pytest.mark.parametrize(
    ("share", "text"), [(0.0, ""), (1.0, "████"), (0.5, "██"), (0.125, "▌"), (0.4, "█▋")]
)
def test_bars(share: float, text: str) -> None:
    assert bar(share, 4) == text


def test_the_command_draws_in_the_terminal_and_as_png(tmp_path: Path) -> None:
    records: list[Mapping[str, Any]] = []
    trace = Trace(records.append, ABOUT)
    for m in MOMENTS:
        trace.round(m.report)
    trace.fell_back("cache_full", "the KV cache was full")
    path = write(tmp_path / "trace", *records)
    picture = tmp_path / "trace.png"
    done = CliRunner().invoke(app, ["trace", str(path), "--png", str(picture)])
    assert done.exit_code == 0, done.output
    assert "2 answers, 7 tokens in 4 rounds; 40 prompt tokens read" in done.output
    assert "accepted 3 / drafted 7 = 43 % (mtp 3)" in done.output
    assert "reasons for the draft depth, in rounds: measured 4" in done.output
    assert "  1 ██████████████████████████▋               67 %  2 / 3" in done.output
    assert "s: the KV cache was full" in done.output
    assert max(map(len, done.output.splitlines())) <= 80
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("name", "message"), [("x.what", "cannot draw"), ("no/x.png", "cannot")])
def test_a_picture_that_cannot_be_written(tmp_path: Path, name: str, message: str) -> None:
    from gguf_mtp.cli.figure import save

    with pytest.raises(GgufMtpError, match=message):
        save(Recording(ABOUT, MOMENTS, [], 0), tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_trace_without_rounds(tmp_path: Path) -> None:
    empty = Recording(ABOUT, [], [], 0)
    assert list(drawn(empty, 80))[-1] == "no rounds were traced"
    from gguf_mtp.cli.figure import save

    with pytest.raises(GgufMtpError, match="nothing to draw"):
        save(empty, tmp_path / "x.png")
