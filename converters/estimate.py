"""What a planned conversion will take: disk, memory and time, before anything is written.

Time comes from running the real steps (read, dequantise, quantise) on a small sample of each kind
of work, so it holds for this machine as long as the disks keep up. Knows nothing of progress.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gguf import GGMLQuantizationType

from ..errors import ConversionError
from ..types import Floats
from .checkpoint import n_bytes_of
from .gguf_file import TypedTensor, row_bytes
from .quantize import CHUNK, N_SPARE, Ggml
from .resume_file import partial_path
from .row_reader import Dequantiser

_SAMPLE_ROWS, _SAMPLE_COLS = 32, 4096
_SAMPLE_S = 0.02
_PYTHON_BYTES = 90_000_000  # interpreter, numpy, gguf and the tables; measured
_BYTES_PER_TENSOR = 700  # header entry, source tensor, fate; measured on all of DeepSeek-V3


class Estimate(NamedTuple):
    """`seconds` is for `n_threads` threads with files that keep up."""

    n_bytes: int
    ram_bytes: int
    seconds: float
    n_threads: int


def estimate(
    tensors: Sequence[TypedTensor], n_source: int, n_bytes: int, n_threads: int
) -> Estimate:
    """`n_source` tensors become `tensors`, a file of `n_bytes`."""
    return Estimate(
        n_bytes, ram_bytes(n_source, n_threads), _seconds(tensors, n_threads), n_threads
    )


def ram_bytes(n_source: int, n_threads: int) -> int:
    """Peak memory: a fixed set of chunk buffers, and a line per source tensor."""
    buffers = (n_threads + N_SPARE) * CHUNK * 12
    return _PYTHON_BYTES + buffers + n_source * _BYTES_PER_TENSOR


def check_disk(out: Path, files: Sequence[Path], n_bytes: int) -> None:
    """Raises `ConversionError` when the folder of `out` has no room for `n_bytes` in `files`."""
    folder = out.resolve().parent
    there = sum(p.stat().st_size for p in map(partial_path, files) if p.exists())
    free = shutil.disk_usage(folder).free
    if n_bytes - there > free:
        raise ConversionError(
            f"{out} needs {n_bytes - there:,} bytes, but {folder} has {free:,} free; "
            "--force tries anyway"
        )


def check_ram(n_bytes: int) -> str | None:
    """A sentence when the memory that is free now is less than `n_bytes`."""
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None
    if n_bytes <= free:
        return None
    return f"needs {n_bytes:,} bytes of memory, but only {free:,} bytes are free"


def _seconds(tensors: Sequence[TypedTensor], n_threads: int) -> float:
    work: dict[tuple[str, GGMLQuantizationType], int] = defaultdict(int)
    for placed in tensors:
        if placed.tensor.is_index:
            continue
        work[placed.tensor.pieces[0].weight.tensor.dtype, placed.type] += placed.tensor.n_elements
    ggml, dequantiser = Ggml(), Dequantiser()
    per_weight = {kind: _cost(ggml, dequantiser, *kind) for kind in work}
    return sum(per_weight[kind] * n for kind, n in work.items()) / n_threads


def _cost(ggml: Ggml, dequantiser: Dequantiser, dtype: str, type_: GGMLQuantizationType) -> float:
    """Seconds per weight on one thread."""
    shape = (_SAMPLE_ROWS, _SAMPLE_COLS)
    rng = np.random.default_rng(0)
    n_bytes = n_bytes_of(dtype, _SAMPLE_ROWS * _SAMPLE_COLS)
    raw = rng.integers(0, 48, n_bytes, np.uint8)
    rows = np.empty(shape, np.float32)
    weights: Floats = rng.standard_normal(shape, np.float32)
    out = np.empty(_SAMPLE_ROWS * row_bytes(type_, _SAMPLE_COLS), np.uint8)
    importance = np.ones(_SAMPLE_COLS, np.float32)
    return (
        _time(lambda: dequantiser.to_float(dtype, raw, rows))
        + _time(lambda: ggml.quantize(type_, weights, out, importance))
    ) / weights.size


def _time(step: Callable[[], None]) -> float:
    step()
    start, n = time.perf_counter(), 0
    while time.perf_counter() - start < _SAMPLE_S:
        step()
        n += 1
    return (time.perf_counter() - start) / n
