"""The folder of stored depth states, and how many cores there are."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from gguf_mtp.depth import DepthOptions, depth_for
from gguf_mtp.errors import RequestError
from gguf_mtp.loading import depth_cache
from gguf_mtp.loading.cores import physical_cores
from gguf_mtp.loading.loader import LoadOptions
from gguf_mtp.offload.options import PlacementOptions


def test_only_the_newest_states_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depth_cache, "export_state", lambda _: {"a": 1})
    old = [tmp_path / f"{i:03d}.json" for i in range(100)]
    for age, file in enumerate(old):
        file.write_text("{}")
        os.utime(file, (1000 + age, 1000 + age))
    left, fresh = tmp_path / ".x.json.1", tmp_path / ".y.json.2"
    left.write_text("half")
    os.utime(left, (1000, 1000))
    fresh.write_text("half")
    new = depth_cache.file_for(tmp_path, "model", 2)
    depth_cache.save_depth(depth_for(DepthOptions(0, 4, 0.0)), new)  # type: ignore[arg-type]
    assert sorted(tmp_path.glob("*.json")) == sorted([*old[-depth_cache.N_KEPT + 1 :], new])
    assert not left.exists()
    assert fresh.exists()  # perhaps another run is writing it


@pytest.mark.parametrize(
    ("answers", "n"),
    [({"hw.perflevel0.physicalcpu": "6\n"}, 6), ({"hw.physicalcpu": "4\n"}, 4), ({}, 10)],
)
def test_cores_where_there_is_no_affinity(
    monkeypatch: pytest.MonkeyPatch, answers: dict[str, str], n: int
) -> None:
    """macOS: its fast cores; elsewhere all there are, which was half of them."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 10)

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[:2] == ["sysctl", "-n"]
        return subprocess.CompletedProcess(command, 0, answers.get(command[2], ""))

    monkeypatch.setattr(subprocess, "run", run)
    assert physical_cores() == n


@pytest.mark.parametrize("kind", ["cache_k", "cache_v"])
def test_strict_refuses_either_quantised_cache(kind: str) -> None:
    with pytest.raises(RequestError, match="--strict uses an F32 KV cache"):
        LoadOptions(strict=True, placement=PlacementOptions(**{kind: "q4_0"}))  # type: ignore[arg-type]
    LoadOptions(strict=True, placement=PlacementOptions(cache_k="f32", cache_v="f32"))
