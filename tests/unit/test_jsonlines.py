"""Lines on disk: whole or not at all, and never a reason to wait."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from gguf_mtp.errors import GgufMtpError
from gguf_mtp.telemetry import jsonlines
from gguf_mtp.telemetry.jsonlines import JsonLines
from tests.support.waiting import wait_for


def test_lines_are_written_in_order_from_many_threads(tmp_path: Path) -> None:
    path = tmp_path / "log"
    lines = JsonLines(path)

    def write(thread: int) -> None:
        for i in range(200):
            lines.write({"thread": thread, "i": i, "text": 'a "line"\nand é 🐻 \ud800'})

    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines.close()
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(records) == 800
    for n in range(4):
        assert [r["i"] for r in records if r["thread"] == n] == list(range(200))
    assert records[0]["text"] == 'a "line"\nand é 🐻 \ud800'
    assert lines.n_lost == 0


def test_a_line_is_there_within_moments(tmp_path: Path) -> None:
    path = tmp_path / "log"
    lines = JsonLines(path)
    lines.write({"a": 1})
    wait_for(path.read_text)
    assert path.read_text() == '{"a":1}\n'
    lines.close()


def test_a_log_grows_and_a_trace_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("old\n")
    for keeps, expected in [(True, 'old\n{"n":1}\n'), (False, '{"n":1}\n')]:
        lines = JsonLines(path, keeps)
        lines.write({"n": 1})
        lines.close()
        assert path.read_text() == expected


def test_what_a_killed_process_left_is_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text('whole\n{"n":')
    lines = JsonLines(path)
    lines.write({"n": 1})
    lines.close()
    assert path.read_text() == 'whole\n{"n":\n{"n":1}\n'


def test_a_file_that_cannot_be_opened_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(GgufMtpError) as refusal:
        JsonLines(tmp_path / "no" / "log")
    assert str(refusal.value) == f"cannot write {tmp_path}/no/log: No such file or directory"


def test_a_full_disk_costs_lines_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    lines = JsonLines(Path("/dev/full"))
    for i in range(3):
        lines.write({"i": i})
        wait_for(lambda: lines.n_lost > i)  # noqa: B023 (waited for here)
    lines.close()
    assert lines.n_lost == 3
    [warning] = caplog.messages  # one, not one a line
    assert warning == "lines for /dev/full are being lost: No space left on device"


def test_a_line_that_did_not_fit_leaves_nothing_behind(tmp_path: Path, monkeypatch) -> None:
    """The disk fills up in the middle of a line, then somebody makes room."""
    path = tmp_path / "log"
    real, is_full = os.write, threading.Event()

    def write(fd: int, data: memoryview) -> int:
        if not is_full.is_set():
            return real(fd, data)
        if len(data) > 5:
            return real(fd, data[:5])  # what there was room for
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(jsonlines.os, "write", write)
    lines = JsonLines(path)
    for text, full in [("first", False), ("lost!!", True), ("last", False)]:
        if full:
            is_full.set()
        else:
            is_full.clear()
        n_bytes, n_lost = path.stat().st_size, lines.n_lost
        lines.write({"text": text})
        if full:
            wait_for(lambda: lines.n_lost > n_lost)  # noqa: B023 (it has been cut back)
        else:
            wait_for(lambda: path.stat().st_size > n_bytes)  # noqa: B023
    lines.close()
    assert path.read_text() == '{"text":"first"}\n{"text":"last"}\n'
    assert lines.n_lost == 1


def test_a_reader_that_has_stopped_holds_nobody_up(monkeypatch, caplog) -> None:
    reader, writer = os.pipe()
    monkeypatch.setattr(jsonlines, "CLOSE_S", 0.2)
    monkeypatch.setattr(jsonlines, "MOST", 100)
    lines = JsonLines(Path(f"/proc/self/fd/{writer}"))
    for _ in range(300):  # a writer that waited for the reader would never come to the end
        lines.write({"text": "x" * 1000})
    assert lines.n_lost > 0
    lines.close()
    assert caplog.messages[-1].endswith("timed out: its last lines are lost")
    os.close(reader)  # the thread's write ends with EPIPE
    os.close(writer)
    lines._thread.join(5)
    assert not lines._thread.is_alive()


def test_standard_output_is_a_file_like_others(capfd: pytest.CaptureFixture[str]) -> None:
    lines = JsonLines(None)
    lines.write({"n": 1})
    lines.close()
    print("still open", flush=True)
    assert capfd.readouterr().out == '{"n":1}\nstill open\n'
