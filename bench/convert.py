"""Speed of converting a checkpoint to a quantised GGUF file: in one pass, and in two steps.

    python -m gguf_mtp.bench.convert [--experts 24] [--layers 2] [--types q8_0,q4_k_m] [--rounds 3]

A checkpoint with DeepSeek-V3's widths and fewer experts and layers is made first (FP8 codes of
normally distributed weights). A round converts it in one pass, then in two steps (our BF16 file,
then `llama_model_quantize`), each in processes of their own with all threads; medians are printed.
The kernel's own rate is that of ggml alone on the same weights and types, all threads busy.
Everything lies in one folder, whose largest size beyond the output is the extra disk.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gguf import GGMLQuantizationType

from ..converters.convert import ConvertOptions, plan
from ..converters.gguf_file import row_bytes
from ..converters.quantize import CHUNK, Ggml
from ..converters.recipes import RECIPES
from ..converters.row_reader import e4m3_table
from ..types import Floats
from .synthetic import V3, Entry, layout, write

_POLL_S = 0.05
_KERNEL_S = 1.5
_COLS = 2048


class ConversionRun(NamedTuple):
    """One conversion: wall and processor seconds, peak memory of its largest process, disk beyond
    the output."""

    seconds: float
    cpu_s: float
    rss_bytes: int
    extra_bytes: int


class Watch:
    """Looks, many times a second, how much disk a folder and how much memory a process take.

    VmHWM is a peak itself. `ru_maxrss` of a child would begin with this process's own size.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._done = folder, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.pid = 0
        self.disk = self.memory = 0

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(_POLL_S):
            self.disk = max(self.disk, _size(self._folder))
            self.memory = max(self.memory, _high_water_mark(self.pid))


def one_pass(source: Path, work: Path, type_: str, n_threads: int) -> ConversionRun:
    out = work / "one-pass.gguf"
    return _measure(work, out, [_convert(source, out, type_, n_threads)])


def two_steps(source: Path, work: Path, type_: str, n_threads: int) -> ConversionRun:
    between, out = work / "bf16.gguf", work / "two-steps.gguf"
    script, file_type = Path(__file__).with_name("llama_quantize.py"), RECIPES[type_].file_type
    second = [sys.executable, script, between, out, str(int(file_type)), str(n_threads)]
    return _measure(work, out, [_convert(source, between, "bf16", n_threads), [*map(str, second)]])


def kernel_rate(source: Path, type_: str, n_threads: int) -> float:
    """Weights per second of ggml alone, with the types in the proportions of this conversion."""
    with plan(source, ConvertOptions(type_)) as job:
        weights: dict[GGMLQuantizationType, int] = defaultdict(int)
        for placed in job.tensors:
            weights[placed.type] += placed.tensor.n_elements
    rows = _weights(np.random.default_rng(0), CHUNK).reshape(-1, _COLS)
    seconds = sum(n / _rate(t, rows, n_threads) for t, n in weights.items())
    return sum(weights.values()) / seconds


def _rate(type_: GGMLQuantizationType, rows: Floats, n_threads: int) -> float:
    ggml, end = Ggml(), time.perf_counter() + _KERNEL_S

    def work(_: int) -> int:
        out = np.empty(len(rows) * row_bytes(type_, _COLS), np.uint8)
        n = 0
        while time.perf_counter() < end:
            ggml.quantize(type_, rows, out, None)
            n += rows.size
        return n

    start = time.perf_counter()
    with ThreadPoolExecutor(n_threads) as pool:
        n = sum(pool.map(work, range(n_threads)))
    return n / (time.perf_counter() - start)


def make_checkpoint(folder: Path, n_layers: int, n_experts: int) -> Path:
    """V3's widths; the vocabulary shrinks with the rest, so that the shares of types stay V3's."""
    config = V3 | {
        "num_hidden_layers": n_layers,
        "first_k_dense_replace": 1,
        "n_routed_experts": n_experts,
        "n_group": 4,
        "topk_group": 2,
        "intermediate_size": 2048,
        "vocab_size": 4096,
    }
    rng = np.random.default_rng(0)
    table = e4m3_table()
    order = np.argsort(table[np.isfinite(table)])
    sorted_values = table[np.isfinite(table)][order]
    codes = np.flatnonzero(np.isfinite(table))[order]
    normal = _weights(rng, 1 << 24) * 4000
    fp8 = codes[np.searchsorted(sorted_values, normal).clip(0, len(codes) - 1)].astype(np.uint8)
    bf16 = (_weights(rng, 1 << 24).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)

    def fill(entry: Entry) -> bytes:
        if entry.dtype == "F32":
            return np.full(entry.shape, 1 / 4000, np.float32).tobytes()
        stock = fp8 if entry.dtype == "F8_E4M3" else bf16
        start = int(rng.integers(0, stock.size // 4)) * 2
        return np.resize(np.roll(stock, start)[: entry.n_bytes], entry.n_bytes).tobytes()

    return write(folder, config, layout(config), fill, n_shards=8)


def _weights(rng: np.random.Generator, n: int) -> Floats:
    weights: Floats = rng.standard_normal(n, np.float32)
    weights *= np.float32(0.02)
    return weights


def _convert(source: Path, out: Path, type_: str, n_threads: int) -> list[str]:
    script = "from gguf_mtp.cli.app import main; main()"
    arguments = ["convert", source, "-o", out, "--type", type_, "-t", n_threads]
    return [sys.executable, "-c", script, *map(str, arguments), "--no-verify", "--quiet"]


def _measure(work: Path, out: Path, commands: Sequence[Sequence[str]]) -> ConversionRun:
    """Run the commands one after the other; what they wrote is on the disk when the clock stops."""
    cpu_s = 0.0
    with Watch(work) as watch:
        start = time.perf_counter()
        for command in commands:
            process = subprocess.Popen(command)
            watch.pid = process.pid
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            cpu_s += usage.ru_utime + usage.ru_stime
            if process.returncode:
                raise SystemExit(f"failed: {' '.join(command)}")
        with out.open("rb") as file:
            os.fsync(file.fileno())
        seconds = time.perf_counter() - start
    extra = watch.disk - out.stat().st_size
    for path in work.iterdir():
        path.unlink()
    return ConversionRun(seconds, cpu_s, watch.memory, max(extra, 0))


def _size(folder: Path) -> int:
    total = 0
    for path in folder.iterdir():
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


def _high_water_mark(pid: int) -> int:
    try:
        match = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return int(match[1]) * 1024 if match else 0


def report(
    type_: str, ways: dict[str, list[ConversionRun]], size: int, n: int, kernel: float
) -> str:
    one, two = (statistics.median(r.seconds for r in runs) for runs in ways.values())
    lines = [
        f"{type_}: {two / one:.2f} x the speed of two steps, "
        f"{n / one / kernel:.2f} of the kernel's {kernel / 1e6:.0f} M weights/s"
    ]
    for name, runs in ways.items():
        each = [r.seconds for r in runs]
        seconds = statistics.median(each)
        cells = (
            f"{seconds:.1f} s ({min(each):.1f} to {max(each):.1f})",
            f"{statistics.median(r.cpu_s for r in runs):.1f} s of CPU time",
            f"{size / seconds / 1e6:.0f} MB/s",
            f"{n / seconds / 1e6:.0f} M weights/s",
            f"{max(r.rss_bytes for r in runs) / 1e6:.0f} MB of memory",
            f"{max(r.extra_bytes for r in runs) / 1e9:.2f} GB of extra disk",
        )
        lines.append(f"  {name}: {', '.join(cells)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=24, help="a multiple of 4, at least 8")
    parser.add_argument("--types", default="q8_0,q4_k_m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--folder", type=Path, help="working folder; default: a temporary folder")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON as well")
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="gguf-mtp-bench-", dir=args.folder))
    try:
        run(work, args)
    finally:
        shutil.rmtree(work)


def run(work: Path, args: argparse.Namespace) -> None:
    source = make_checkpoint(work / "checkpoint", args.layers, args.experts)
    with plan(source, ConvertOptions()) as job:
        size = job.checkpoint.n_bytes
        n = sum(t.tensor.n_elements for t in job.tensors)
    print(f"{size / 1e9:.2f} GB, {n / 1e9:.2f} G weights, {args.threads} threads", flush=True)
    output = work / "output"
    output.mkdir()
    for type_ in args.types.split(","):
        ways: dict[str, list[ConversionRun]] = {"one pass": [], "two steps": []}
        rates = []
        for _ in range(args.rounds):
            ways["one pass"].append(one_pass(source, output, type_, args.threads))
            ways["two steps"].append(two_steps(source, output, type_, args.threads))
            rates.append(kernel_rate(source, type_, args.threads))
        kernel = statistics.median(rates)
        print(report(type_, ways, size, n, kernel), flush=True)
        if args.json:
            figures = {name: [r._asdict() for r in runs] for name, runs in ways.items()}
            print(json.dumps({"type": type_, "kernel_weights_per_s": kernel, **figures}))


if __name__ == "__main__":
    main()
