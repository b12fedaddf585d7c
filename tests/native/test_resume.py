"""Conversions that are killed, or run out of disk, and go on: the bytes of an undisturbed run."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

from gguf_mtp.converters.checkpoint import Checkpoint, SourceTensor
from gguf_mtp.converters.convert import ConvertOptions, convert, plan
from gguf_mtp.converters.resume_file import journal_path, partial_path, read_journal
from gguf_mtp.errors import ConversionError
from tests.support.checkpoints import widened

pytestmark = pytest.mark.native

OPTIONS = ConvertOptions("q5_1", n_threads=2)
RESUME = ConvertOptions("q5_1", n_threads=2, resume=True)
SCRIPT = """
import sys
from pathlib import Path
from gguf_mtp.converters.convert import ConvertOptions, convert
convert(Path(sys.argv[1]), Path(sys.argv[2]), ConvertOptions("q5_1", n_threads=2, resume=True))
"""


class Undisturbed(NamedTuple):
    checkpoint: Path
    data: bytes
    ends: list[int]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    folder = tmp_path_factory.mktemp("resume")
    checkpoint = widened(folder / "checkpoint", 16)
    convert(checkpoint, folder / "out.gguf", OPTIONS)
    with plan(checkpoint, OPTIONS) as job:
        return Undisturbed(checkpoint, (folder / "out.gguf").read_bytes(), job.shards[0].ends)


def run_until(checkpoint: Path, out: Path, size: int) -> bool:
    """Go on in another process, killed once it has written `size` bytes. False: it finished."""
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(checkpoint), str(out)])
    try:
        while process.poll() is None:
            try:
                if partial_path(out).stat().st_size >= size:
                    process.send_signal(signal.SIGKILL)
                    break
            except FileNotFoundError:
                pass
            time.sleep(0.0005)
    finally:
        code = process.wait(60)
    assert code in (0, -signal.SIGKILL)
    return code != 0


def check_killed(undisturbed: Undisturbed, out: Path, n_kills: int, seed: int) -> None:
    rng, total, n = random.Random(seed), undisturbed.ends[-1], 0
    while n < n_kills:
        at = partial_path(out).stat().st_size if partial_path(out).exists() else 0
        if not run_until(undisturbed.checkpoint, out, rng.randint(at, at + total // n_kills)):
            out.unlink()  # it was faster than the signal: begin again
            continue
        n += 1
        left = read_journal(out)
        n_done = left.n_done if left else 0
        # At most the tensor that was being written when the signal came is written again.
        assert partial_path(out).stat().st_size <= undisturbed.ends[n_done]
        assert not out.exists()
    convert(undisturbed.checkpoint, out, RESUME)
    assert out.read_bytes() == undisturbed.data
    assert [p.name for p in out.parent.iterdir()] == [out.name]


def test_killed_three_times(undisturbed: Undisturbed, tmp_path: Path) -> None:
    check_killed(undisturbed, tmp_path / "out.gguf", 3, seed=0)


@pytest.mark.slow
def test_killed_twenty_times(undisturbed: Undisturbed, tmp_path: Path) -> None:
    check_killed(undisturbed, tmp_path / "out.gguf", 20, seed=1)


def full_disk(monkeypatch: pytest.MonkeyPatch, capacity: int) -> None:
    real, left = os.write, capacity

    def write(fd: int, data: memoryview | bytes) -> int:
        nonlocal left
        if len(data) < 200:
            return real(fd, data)  # the journal
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        n = real(fd, bytes(data[:left]))
        left -= n
        return n

    monkeypatch.setattr(os, "write", write)


def test_full_disk(
    undisturbed: Undisturbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.gguf"
    with monkeypatch.context() as patch:
        full_disk(patch, undisturbed.ends[-1] // 3)
        with pytest.raises(ConversionError) as error:
            convert(undisturbed.checkpoint, out, OPTIONS)
    assert "No space left on device" in str(error.value)
    assert "--resume continues" in str(error.value)
    left = read_journal(out)
    assert left is not None
    assert 0 < left.n_done < len(undisturbed.ends)
    convert(undisturbed.checkpoint, out, RESUME)
    assert out.read_bytes() == undisturbed.data


def test_a_source_that_fails_for_a_while(
    undisturbed: Undisturbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, real = tmp_path / "out.gguf", Checkpoint.read_into

    def read_into(self: Checkpoint, tensor: SourceTensor, offset: int, buffer: memoryview) -> None:
        if tensor.name.startswith("model.layers.4."):
            raise OSError(errno.EIO, os.strerror(errno.EIO), f"{self.folder / tensor.file}")
        real(self, tensor, offset, buffer)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "read_into", read_into)
        with pytest.raises(ConversionError, match=r"safetensors: Input/output error; .*--resume"):
            convert(undisturbed.checkpoint, out, OPTIONS)
    convert(undisturbed.checkpoint, out, RESUME)
    assert out.read_bytes() == undisturbed.data


def test_interrupted_by_the_user(undisturbed: Undisturbed, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"

    def stop(_: object) -> None:
        if partial_path(out).stat().st_size > undisturbed.ends[-1] // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(undisturbed.checkpoint, out, OPTIONS, stop)
    assert not out.exists()
    convert(undisturbed.checkpoint, out, RESUME)
    assert out.read_bytes() == undisturbed.data


def test_resume_writes_only_what_is_missing(undisturbed: Undisturbed, tmp_path: Path) -> None:
    out, seen = tmp_path / "out.gguf", list[str]()

    def stop_after(n: int) -> Callable[[object], None]:
        def stop(_: object) -> None:
            left = read_journal(out)
            if left and left.n_done >= n:
                raise KeyboardInterrupt

        return stop

    with pytest.raises(KeyboardInterrupt):
        convert(undisturbed.checkpoint, out, OPTIONS, stop_after(50))
    convert(undisturbed.checkpoint, out, RESUME, lambda p: seen.append(p.tensor))
    with plan(undisturbed.checkpoint, OPTIONS) as job:
        names = [t.tensor.name for t in job.tensors]
    assert list(dict.fromkeys(seen)) == names[50:]


def test_a_nan_leaves_nothing(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """No rerun would help, so there is nothing to keep."""
    source = tmp_path / "checkpoint"
    source.mkdir()
    for path in undisturbed.checkpoint.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    with Checkpoint(source) as checkpoint:
        tensor = checkpoint.tensors["model.layers.2.self_attn.q_a_proj.weight"]
    shard = np.memmap(source / tensor.file, np.uint8, "r+")
    shard[tensor.begin + 1000] = 0x7F
    shard.flush()
    with pytest.raises(ConversionError) as error:
        convert(source, tmp_path / "out.gguf", OPTIONS)
    assert str(error.value) == f"{tensor.name} holds a NaN or an infinity"
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]


def test_a_changed_source_is_not_gone_on_with(undisturbed: Undisturbed, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"

    def stop(_: object) -> None:
        left = read_journal(out)
        if left and left.n_done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(undisturbed.checkpoint, out, OPTIONS, stop)
    other = ConvertOptions("q5_1", tensor_types=("attn_q_a=q8_0",), resume=True)
    with pytest.raises(ConversionError, match="with other options"):
        convert(undisturbed.checkpoint, out, other)
    shard = next(undisturbed.checkpoint.glob("*.safetensors"))
    times = shard.stat()
    with shard.open("r+b") as stream:  # the last byte, and the times set back as rsync does
        stream.seek(-1, os.SEEK_END)
        last = stream.read(1)
        stream.seek(-1, os.SEEK_END)
        stream.write(bytes([last[0] ^ 1]))
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert shard.stat().st_mtime_ns == times.st_mtime_ns
    with pytest.raises(ConversionError, match="started from another checkpoint"):
        convert(undisturbed.checkpoint, out, RESUME)
    assert journal_path(out).exists()


def test_disk_too_small(
    undisturbed: Undisturbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = undisturbed.ends[-1]
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=size - 1))
    with pytest.raises(
        ConversionError, match=f"needs {size:,} bytes, but .* has {size - 1:,} free"
    ):
        convert(undisturbed.checkpoint, tmp_path / "out.gguf", OPTIONS)
    assert list(tmp_path.iterdir()) == []
    convert(undisturbed.checkpoint, tmp_path / "out.gguf", ConvertOptions("q5_1", force=True))
    assert (tmp_path / "out.gguf").stat().st_size == size
