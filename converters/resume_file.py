"""A file that gets its name only when it is whole, and a journal to go on with after a kill.

`OUT.partial` is written in order; `OUT.partial.journal` has one line per finished tensor. A killed
process loses nothing the kernel had taken, so within one boot the journal's "written" lines hold;
after a crash of the machine only its "synced" lines do, which follow an fdatasync.

It knows nothing of what the bytes mean.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..errors import ConversionError

Leftovers = Literal["refuse", "resume", "discard"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Left(NamedTuple):
    """What an interrupted run left: `n_done` tensors hold now, `n_synced` whatever happens."""

    fingerprint: str
    n_done: int
    n_synced: int


def partial_path(out: Path) -> Path:
    return out.with_name(f"{out.name}.partial")


def journal_path(out: Path) -> Path:
    return out.with_name(f"{out.name}.partial.journal")


def refuse_replacing(out: Path, force: bool, resume: bool = False) -> None:
    """Raises `ConversionError` where a file would be lost that nobody said may be; with `resume`
    whoever began the run has said so."""
    shard = f"{glob.escape(out.stem)}-?????-of-?????{glob.escape(out.suffix)}"
    journals = [journal_path(out), *out.parent.glob(journal_path(out.with_name(shard)).name)]
    if force or (resume and any(path.exists() for path in journals)):
        return
    for path in [out, *sorted(out.parent.glob(shard))]:
        if path.is_file() and path.stat().st_size:
            why = ", and no interrupted run of it is left" if resume else ""
            raise ConversionError(
                f"{path} exists{why}; --force replaces it, -o writes another file"
            )


def check_place(out: Path) -> None:
    """Raises `ConversionError` when no file can have the name `out`."""
    if out.is_dir():
        raise ConversionError(f"{out} is a folder; give the name of a file")
    if not out.resolve().parent.is_dir():
        raise ConversionError(f"{out.parent} is not a folder; the output cannot be written there")
    if out.exists() and not _may_be_replaced(out):
        raise ConversionError(f"{out} exists and is not a GGUF file; give another name")


def _may_be_replaced(path: Path) -> bool:
    """What stood in the place of an output is lost: only another output may be, or nothing."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) in (b"GGUF", b"")


class PartialFile:
    """The output while it is written, locked against a second writer.

    `ends[i]` is the file's length when tensor i is whole; `n_done` tensors are there already and
    the next byte goes after them. A context manager: `finish` gives the output its name, leaving
    without it keeps the partial file and its journal.

    Raises `OSError`; and `ConversionError` when another process writes the same output, when there
    are leftovers and `leftovers` is "refuse", and when they have another fingerprint and it is
    "resume".
    """

    def __init__(
        self, out: Path, fingerprint: str, ends: Sequence[int], leftovers: Leftovers
    ) -> None:
        self.out = out
        self._fd = os.open(partial_path(out), os.O_RDWR | os.O_CREAT, 0o666)
        self._journal = -1
        try:
            self._lock()
            left = self._left(fingerprint, leftovers)
            self.n_done = _fitting(left.n_done, ends, os.fstat(self._fd).st_size)
            os.ftruncate(self._fd, ends[self.n_done - 1] if self.n_done else 0)
            os.lseek(self._fd, 0, os.SEEK_END)
            self._begin_journal(left._replace(n_done=self.n_done))
        except BaseException:
            self._close()
            raise
        self._syncer = ThreadPoolExecutor(1, thread_name_prefix="sync")
        self._syncing: Future[None] | None = None

    def __enter__(self) -> PartialFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._syncer.shutdown(wait=True)
        self._close()

    def write(self, data: memoryview) -> None:
        """All of `data`; a full disk shows as a short write first."""
        while data:
            data = data[os.write(self._fd, data) :]

    def complete(self) -> None:
        """The next tensor is whole: remember it, and see to it that it reaches the disk."""
        self.n_done += 1
        self._note({"written": self.n_done})
        if self._syncing is None or self._syncing.done():
            self._raise_sync_error()
            self._syncing = self._syncer.submit(self._sync, self.n_done)

    def finish(self) -> None:
        """Everything is written: to the disk with it, then the name."""
        self.settle()
        self.name()
        journal_path(self.out).unlink(missing_ok=True)

    def settle(self) -> None:
        """Everything is written: to the disk with it."""
        self._syncer.shutdown(wait=True)
        self._raise_sync_error()
        os.fsync(self._fd)
        self._note({"synced": self.n_done})

    def name(self) -> None:
        """Give the settled file its name; the journal stays as the proof that it is this one."""
        partial_path(self.out).replace(self.out)
        with contextlib.suppress(OSError):  # not every file system syncs folders
            folder = os.open(self.out.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def discard(self) -> None:
        """Leave nothing behind."""
        for path in (partial_path(self.out), journal_path(self.out)):
            path.unlink(missing_ok=True)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever held the lock may have renamed the file meanwhile: then ours is the output.
            is_ours = os.path.samestat(os.fstat(self._fd), partial_path(self.out).stat())
        except (BlockingIOError, FileNotFoundError):
            is_ours = False
        if not is_ours:
            raise ConversionError(f"another process is writing {self.out}")

    def _left(self, fingerprint: str, leftovers: Leftovers) -> Left:
        nothing = Left(fingerprint, 0, 0)
        left = read_journal(self.out)
        if left is None or leftovers == "discard":
            return nothing
        if leftovers == "refuse" and left.n_done:
            raise ConversionError(
                f"{partial_path(self.out)} is left from an interrupted run; --resume continues "
                "it, --force starts over"
            )
        if leftovers == "resume" and left.fingerprint != fingerprint:
            raise ConversionError(
                f"{partial_path(self.out)} was started from another checkpoint or with other "
                "options; --force starts over"
            )
        return left if leftovers == "resume" else nothing

    def _begin_journal(self, left: Left) -> None:
        """A new journal each time, put in place whole: a killed run may have torn the old one."""
        path = journal_path(self.out)
        new = path.with_name(f"{path.name}.new")
        record = {
            "fingerprint": left.fingerprint,
            "boot": boot_id(),
            "written": left.n_done,
            "synced": min(left.n_synced, left.n_done),
        }
        new.write_text(json.dumps(record) + "\n", encoding="utf-8")
        new.replace(path)
        self._journal = os.open(path, os.O_WRONLY | os.O_APPEND)

    def _note(self, record: dict[str, int]) -> None:
        os.write(self._journal, (json.dumps(record) + "\n").encode())

    def _sync(self, n: int) -> None:
        getattr(os, "fdatasync", os.fsync)(self._fd)
        self._note({"synced": n})

    def _raise_sync_error(self) -> None:
        if self._syncing is not None and (error := self._syncing.exception()):
            raise error

    def _close(self) -> None:
        for fd in (self._fd, self._journal):
            if fd >= 0:
                os.close(fd)
        self._fd = self._journal = -1


def read_journal(out: Path) -> Left | None:
    """What an earlier run left for `out`, None when that is nothing to go on with."""
    records = _records(journal_path(out))
    if not records or not partial_path(out).exists():
        return None
    first = records[0]
    n_written = max((int(r["written"]) for r in records if "written" in r), default=0)
    n_synced = max((int(r["synced"]) for r in records if "synced" in r), default=0)
    same_boot = first.get("boot") == boot_id() != ""
    return Left(str(first.get("fingerprint")), n_written if same_boot else n_synced, n_synced)


def is_named(out: Path, fingerprint: str, ends: Sequence[int]) -> bool:
    """Whether `out` is the finished file of this very run, named before the run was interrupted."""
    records = _records(journal_path(out))
    return (
        bool(records)
        and not partial_path(out).exists()
        and records[0].get("fingerprint") == fingerprint
        and max((int(r["synced"]) for r in records if "synced" in r), default=0) == len(ends)
        and out.is_file()
        and out.stat().st_size == ends[-1]
    )


def boot_id() -> str:
    """Differs from one start of the machine to the next; "" where the system has none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _fitting(n_done: int, ends: Sequence[int], size: int) -> int:
    """Of `n_done` tensors, those that a file of `size` bytes can hold."""
    n_done = min(n_done, len(ends))
    while n_done and ends[n_done - 1] > size:
        n_done -= 1
    return n_done


def _records(path: Path) -> list[dict[str, Any]]:
    """The journal's whole lines; a torn last one is left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    records = []
    for line in lines:
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records
