"""The demo model's cache: made once, made again when it must be, and never half there."""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from gguf import GGUFReader

from gguf_mtp import demo
from gguf_mtp.converters.convert import Progress
from gguf_mtp.demo import demo_model

pytestmark = pytest.mark.native  # ggml does the quantising


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_converts_once(tmp_path: Path) -> None:
    seen: list[Progress] = []
    path = demo_model(tmp_path, seen.append)
    assert seen[-1].n_done == seen[-1].n_total == path.stat().st_size
    assert len(GGUFReader(path).tensors) == 128
    made = path.stat().st_mtime_ns
    assert demo_model(tmp_path, seen.append) == path
    assert path.stat().st_mtime_ns == made
    assert files(tmp_path) == [path.name, f"{path.name}.sha256"]


def test_another_type_is_another_file(tmp_path: Path) -> None:
    q8_0, f32 = demo_model(tmp_path), demo_model(tmp_path, kind="f32")
    assert q8_0 != f32
    assert f32.stat().st_size > 3 * q8_0.stat().st_size


def test_a_new_converter_makes_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = demo_model(tmp_path)
    monkeypatch.setattr(demo, "CONVERTER_VERSION", "next")
    assert demo_model(tmp_path) != first


def test_a_new_checkpoint_makes_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = demo_model(tmp_path / "cache")
    shutil.copytree(demo.CHECKPOINT, tmp_path / "checkpoint")
    path = tmp_path / "checkpoint/generation_config.json"
    path.write_text(path.read_text().replace("0.6", "0.7"))
    monkeypatch.setattr(demo, "CHECKPOINT", tmp_path / "checkpoint")
    assert demo_model(tmp_path / "cache") != first


@pytest.mark.parametrize("where", [100, -100, 6_000_000], ids=["header", "end", "middle"])
def test_a_damaged_file_is_made_again(tmp_path: Path, where: int) -> None:
    path = demo_model(tmp_path)
    sound = path.read_bytes()
    damaged = bytearray(sound)
    damaged[where] ^= 0xFF
    path.write_bytes(damaged)
    assert demo_model(tmp_path) == path
    assert path.read_bytes() == sound


def test_a_file_cut_short_is_made_again(tmp_path: Path) -> None:
    path = demo_model(tmp_path)
    sound = path.read_bytes()
    path.write_bytes(sound[: len(sound) // 2])
    assert demo_model(tmp_path).read_bytes() == sound


def test_a_lost_hash_makes_it_again(tmp_path: Path) -> None:
    path = demo_model(tmp_path)
    path.with_name(f"{path.name}.sha256").unlink()
    made = path.stat().st_mtime_ns
    assert demo_model(tmp_path).stat().st_mtime_ns != made


def _make(cache: Path, barrier: multiprocessing.synchronize.Barrier) -> None:
    barrier.wait()
    demo_model(cache)


def test_processes_at_once_all_end_well(tmp_path: Path) -> None:
    """Spawned, so that each begins with nothing but the folder."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(3)
    processes = [context.Process(target=_make, args=(tmp_path, barrier)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    path = demo_model(tmp_path / "alone")
    assert files(tmp_path) == ["alone", path.name, f"{path.name}.sha256"]
    assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def test_what_a_killed_process_left_goes(tmp_path: Path) -> None:
    old, new = tmp_path / ".converting-old", tmp_path / ".converting-new"
    for folder in (old, new):
        folder.mkdir()
        (folder / "x.gguf.partial").write_bytes(b"x")
    os.utime(old, (0, 0))
    demo_model(tmp_path)
    assert not old.exists()
    assert new.exists()  # another process may be at work there


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_a_cache_that_cannot_be_written(
    tmp_path: Path, temporary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file stands where a folder would go: that stops even the superuser."""
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        path = demo_model(tmp_path / "file/cache")
    assert path.parent == temporary / f"gguf-mtp-{os.getuid()}"
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert "cannot write to the cache" in caplog.text
    made = path.stat().st_mtime_ns
    assert demo_model(tmp_path / "file/cache") == path
    assert path.stat().st_mtime_ns == made


@pytest.mark.skipif(os.getuid() == 0, reason="the superuser writes anywhere")
def test_a_read_only_cache(tmp_path: Path, temporary: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o500)
    assert demo_model(cache).is_relative_to(temporary)


def test_a_read_only_cache_that_has_it(tmp_path: Path) -> None:
    path = demo_model(tmp_path)
    tmp_path.chmod(0o500)
    try:
        assert demo_model(tmp_path) == path
    finally:
        tmp_path.chmod(0o700)


def test_a_temporary_folder_of_someone_else_is_not_used(tmp_path: Path, temporary: Path) -> None:
    """A link planted under the name we would take leads nowhere of ours."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (temporary / f"gguf-mtp-{os.getuid()}").symlink_to(elsewhere)
    (tmp_path / "file").write_text("")
    path = demo_model(tmp_path / "file/cache")
    assert path.is_relative_to(temporary)
    assert files(elsewhere) == []
