"""The partial file and its journal: what survives a kill, a crash, a full disk, a second writer."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from gguf_mtp.converters import resume_file
from gguf_mtp.converters.resume_file import (
    Leftovers,
    PartialFile,
    journal_path,
    partial_path,
    read_journal,
)
from gguf_mtp.errors import ConversionError

ENDS = [10, 20, 30]
PARTS = [b"header----", b"tensor-1--", b"tensor-2--"]


def begin(out: Path, leftovers: Leftovers = "refuse", fingerprint: str = "f") -> PartialFile:
    return PartialFile(out, fingerprint, ENDS, leftovers)


def write(file: PartialFile, n: int) -> None:
    for part in PARTS[file.n_done : n]:
        file.write(memoryview(part))
        file.complete()


def interrupted(out: Path, n: int, torn: bytes = b"") -> None:
    """What a run leaves that ends after `n` parts and a piece of the next."""
    with begin(out) as file:
        write(file, n)
        file.write(memoryview(torn))


def test_gets_its_name_when_whole(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with begin(out) as file:
        write(file, 2)
        assert not out.exists()
        write(file, 3)
        file.finish()
    assert out.read_bytes() == b"".join(PARTS)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_the_old_output_stays_until_then(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_bytes(b"old")
    interrupted(out, 2)
    assert out.read_bytes() == b"old"


@pytest.mark.parametrize("n", [0, 1, 2, 3])
@pytest.mark.parametrize("torn", [b"", b"tens"])
def test_goes_on_after_the_last_whole_tensor(tmp_path: Path, n: int, torn: bytes) -> None:
    out = tmp_path / "out"
    interrupted(out, n, torn)
    with begin(out, "resume") as file:
        assert file.n_done == n
        write(file, 3)
        file.finish()
    assert out.read_bytes() == b"".join(PARTS)


def test_resume_without_leftovers_begins(tmp_path: Path) -> None:
    with begin(tmp_path / "out", "resume") as file:
        assert file.n_done == 0


def test_leftovers_are_not_lost_by_accident(tmp_path: Path) -> None:
    out = tmp_path / "out"
    interrupted(out, 2)
    with pytest.raises(ConversionError, match="--resume continues it, --force starts over"):
        begin(out)
    assert read_journal(out) is not None
    with begin(out, "discard") as file:
        assert file.n_done == 0


def test_nothing_done_is_nothing_lost(tmp_path: Path) -> None:
    interrupted(tmp_path / "out", 0)
    with begin(tmp_path / "out") as file:
        assert file.n_done == 0


def test_other_source_or_options(tmp_path: Path) -> None:
    out = tmp_path / "out"
    interrupted(out, 2)
    with pytest.raises(ConversionError, match="started from another checkpoint or with other"):
        begin(out, "resume", fingerprint="g")
    with begin(out, "resume") as file:
        assert file.n_done == 2


@pytest.mark.parametrize("tail", ['{"writ', "\n", '{"written": 3'])
def test_a_torn_journal_line_is_left_out(tmp_path: Path, tail: str) -> None:
    out = tmp_path / "out"
    interrupted(out, 2)
    with journal_path(out).open("a") as journal:
        journal.write(tail)
    for _ in range(2):  # a second kill, after going on from the torn line
        with begin(out, "resume") as file:
            assert file.n_done == 2
    with begin(out, "resume") as file:
        write(file, 3)
    left = read_journal(out)
    assert left is not None
    assert left.n_done == 3


def test_the_file_has_the_last_word(tmp_path: Path) -> None:
    """The journal may know of tensors that the file lost; those are written again."""
    out = tmp_path / "out"
    interrupted(out, 3)
    os.truncate(partial_path(out), 25)
    with begin(out, "resume") as file:
        assert file.n_done == 2


def reboot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    (tmp_path / "boot").write_text(name)
    monkeypatch.setattr(resume_file, "_BOOT_ID", tmp_path / "boot")


def test_after_a_crash_of_the_machine_only_what_was_synced_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    reboot(monkeypatch, tmp_path, "first")
    interrupted(out, 2)
    records = [json.loads(line) for line in journal_path(out).read_text().splitlines()]
    assert {"synced": 1} in records
    lines = [json.dumps(r) for r in records if r != {"synced": 2}]
    journal_path(out).write_text("\n".join(lines) + "\n")
    reboot(monkeypatch, tmp_path, "second")
    with begin(out, "resume") as file:
        assert file.n_done == 1
        write(file, 2)
    reboot(monkeypatch, tmp_path, "third")
    with begin(out, "resume") as file:
        assert file.n_done in (1, 2)


def test_a_system_without_boot_ids_trusts_only_what_was_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume_file, "_BOOT_ID", tmp_path / "nowhere")
    out = tmp_path / "out"
    interrupted(out, 1)
    journal = [json.loads(line) for line in journal_path(out).read_text().splitlines()]
    journal_path(out).write_text(json.dumps(journal[0] | {"synced": 0}) + '\n{"written": 1}\n')
    with begin(out, "resume") as file:
        assert file.n_done == 0


def test_two_writers(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with begin(out) as file:
        write(file, 1)
        for leftovers in ("refuse", "resume", "discard"):
            with pytest.raises(ConversionError, match="another process is writing"):
                begin(out, leftovers)
        write(file, 3)
        file.finish()
    assert out.read_bytes() == b"".join(PARTS)


def test_a_writer_that_finished_meanwhile_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opened as the partial file, locked as the finished output: then it is not ours."""
    out = tmp_path / "out"
    with begin(out) as file:
        write(file, 3)
        descriptor = os.dup(file._fd)
        file.finish()
    monkeypatch.setattr(os, "open", lambda *_: descriptor)
    with pytest.raises(ConversionError, match="another process is writing"):
        begin(out)
    assert out.read_bytes() == b"".join(PARTS)


def test_short_writes_are_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, bytes(data)[:3] or data))
    with begin(tmp_path / "out") as file:
        file.write(memoryview(PARTS[0]))
    assert partial_path(tmp_path / "out").read_bytes() == PARTS[0]


def test_a_failed_sync_is_not_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> None:
        raise OSError(errno.EIO, "the disk is broken")

    with begin(tmp_path / "out") as file:
        monkeypatch.setattr(os, "fdatasync", fail)
        write(file, 1)
        with pytest.raises(OSError, match="the disk is broken"):
            file.finish()
    assert not (tmp_path / "out").exists()


def test_discard_leaves_nothing(tmp_path: Path) -> None:
    with begin(tmp_path / "out") as file:
        write(file, 1)
        file.discard()
    assert list(tmp_path.iterdir()) == []
