"""Converting straight from a hub: the same bytes, no shard kept, resumed after it went away."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gguf_mtp.converters import remote_shards as remote_module
from gguf_mtp.converters.convert import ConvertOptions, Progress, convert
from gguf_mtp.converters.convert import write as convert_write
from gguf_mtp.converters.hub import fetch_checkpoint
from gguf_mtp.converters.planning import plan
from gguf_mtp.converters.remote_shards import RemoteShards
from gguf_mtp.demo import CHECKPOINT
from gguf_mtp.errors import ConversionError
from tests.support.hub_world import MINE, World, world

__all__ = ["world"]

SHARD = "model-00002-of-000003.safetensors"
STREAMED = ConvertOptions(name="demo", n_threads=2)


def remote(
    world: World,
    out: Path,
    options: ConvertOptions = STREAMED,
    progress: Callable[[Progress], None] | None = None,
) -> None:
    folder = fetch_checkpoint(world.hub, MINE, options.needs, with_shards=False)
    assert not list(folder.glob("*.safetensors"))
    with plan(folder, options, RemoteShards(world.hub, MINE)) as job:
        convert_write(job, out, options, progress)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_module, "BLOCK", 1 << 18)


@pytest.mark.native
@pytest.mark.usefixtures("small_blocks")
def test_streaming_makes_the_same_bytes_and_keeps_no_shard(world: World, tmp_path: Path) -> None:
    world.fake.faults[SHARD] = ["drop", 503, "refuse", *["pass"] * 5, "whole"]
    remote(world, tmp_path / "a.gguf")
    convert(CHECKPOINT, tmp_path / "b.gguf", ConvertOptions(name="demo"))
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    n_bytes = sum(p.stat().st_size for p in CHECKPOINT.glob("*.safetensors"))
    assert sum(world.fake.sent.values()) < 1.6 * n_bytes


@pytest.mark.native
@pytest.mark.usefixtures("small_blocks")
def test_streaming_the_block_reads_little_else(world: World, tmp_path: Path) -> None:
    remote(world, tmp_path / "mtp.gguf", replace(STREAMED, mtp="only"))
    n_bytes = sum(p.stat().st_size for p in CHECKPOINT.glob("*.safetensors"))
    assert sum(n for f, n in world.fake.sent.items() if "safetensors" in f) < 0.8 * n_bytes


@pytest.mark.native
@pytest.mark.usefixtures("small_blocks")
def test_a_hub_that_goes_away_leaves_something_to_resume(world: World, tmp_path: Path) -> None:
    def fail_half_way(p: Progress) -> None:
        if p.n_done > p.n_total / 2:
            world.fake.faults["model-00003-of-000003.safetensors"] = [503] * 900

    with pytest.raises(ConversionError, match=r"answers 503.*keeps \d+ of 128 tensors; --resume"):
        remote(world, tmp_path / "a.gguf", progress=fail_half_way)
    world.fake.faults.clear()
    remote(world, tmp_path / "a.gguf", replace(STREAMED, resume=True))
    convert(CHECKPOINT, tmp_path / "b.gguf", ConvertOptions(name="demo"))
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
