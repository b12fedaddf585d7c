"""What the machine's own memory can give."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gguf_mtp.placement import host_memory


@pytest.mark.parametrize(
    ("meminfo", "limit", "expected"),
    [
        ("MemTotal: 9 kB\nMemAvailable:    1000 kB\n", None, 1000 * 1024),
        ("MemAvailable: 1000 kB\n", "max\n", 1000 * 1024),
        ("MemAvailable: 1000 kB\n", "4096\n", 4096),
        ("MemAvailable: 1 kB\n", "4096\n", 1024),
    ],
)
def test_a_container_s_limit_counts(
    tmp_path: Path, meminfo: str, limit: str | None, expected: int
) -> None:
    (tmp_path / "meminfo").write_text(meminfo)
    if limit is not None:
        (tmp_path / "limit").write_text(limit)
    assert host_memory.available(tmp_path / "meminfo", tmp_path / "limit") == expected


def test_without_linux_s_estimate_it_is_all_of_the_memory(tmp_path: Path) -> None:
    all_of_it = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert host_memory.available(tmp_path / "no", tmp_path / "no") == all_of_it


def test_bandwidth_is_that_of_memory() -> None:
    """Between a slow disk and a fast cache, whatever else the machine is doing."""
    assert 1e8 < host_memory.bandwidth(1) < 1e12
