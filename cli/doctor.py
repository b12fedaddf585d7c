"""`gguf-mtp doctor`: is this machine set up as well as it could be, and what to do about it."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

__all__ = ["Finding", "doctor"]

_PACKAGES = ("gguf-mtp", "llama-cpp-python", "gguf", "numpy", "huggingface-hub")
_FEATURES = {
    "AVX": "avx",
    "AVX2": "avx2",
    "FMA": "fma",
    "F16C": "f16c",
    "AVX_VNNI": "avx_vnni",
    "AVX512": "avx512f",
    "AVX512_VNNI": "avx512_vnni",
    "AVX512_BF16": "avx512_bf16",
    "AMX_INT8": "amx_int8",
    "NEON": "asimd",
    "DOTPROD": "asimddp",
    "MATMUL_INT8": "i8mm",
    "SVE": "sve",
}
"""llama.cpp's names of what it was built to use, and Linux's of what a processor has."""
_REBUILD = (
    "pip install --force-reinstall --no-cache-dir --no-binary llama-cpp-python llama-cpp-python=="
)
_CARDS = {"nvidia-smi": "CUDA", "rocminfo": "HIP"}
"""Programs that tell of a card, and the backend that would use it."""


class Finding(NamedTuple):
    """What was found, and what to do about it, if anything; `is_broken` where gguf-mtp cannot work
    as it is."""

    subject: str
    value: str
    advice: str = ""
    is_broken: bool = False


def doctor(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document, for bug reports.")
    ] = False,
) -> None:
    """Check this machine and installation, and say what would make it faster. The exit code is 1
    if something does not work."""
    found = []
    for check in (versions, build, processor, memory, devices, rpc, folders, drafting):
        for one in _safely(check):
            found.append(one)
            if not as_json:
                _show(one)
    if as_json:
        print(json.dumps([one._asdict() for one in found], ensure_ascii=False))
    if any(one.is_broken for one in found):
        raise typer.Exit(1)


def _safely(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """A check that fails is a finding too: the others still tell something."""
    try:
        yield from check()
    except Exception as error:
        reason = str(error) or type(error).__name__
        yield Finding(check.__name__, f"cannot be checked: {reason}", is_broken=True)


def _show(finding: Finding) -> None:
    print(f"{finding.subject:11} {finding.value}", flush=True)
    if finding.advice:
        print(f"{'':11} -> {finding.advice}", flush=True)


def versions() -> Iterator[Finding]:
    """Of this package, of what it stands on, and of Python."""
    from ..llama.binding import LLAMA_CPP_PYTHON

    found = {name: _version(name) for name in _PACKAGES}
    advice = ""
    if found["llama-cpp-python"] != LLAMA_CPP_PYTHON:
        advice = f"gguf-mtp is tested with llama-cpp-python {LLAMA_CPP_PYTHON}: install that one"
    listed = ", ".join(f"{name} {version}" for name, version in found.items())
    yield Finding("versions", listed, advice)
    yield Finding("python", f"{platform.python_version()} ({sys.executable})")
    yield Finding("system", platform.platform())


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def build() -> Iterator[Finding]:
    """Whether llama.cpp was compiled for this processor."""
    from ..llama.binding import LLAMA_CPP_PYTHON, system_info

    used = features_used(system_info())
    unused = features_unused(used, _cpu_flags())
    advice = ""
    if unused:
        advice = f"llama.cpp was built without {', '.join(unused)}, which this processor has: "
        advice += f"{_REBUILD}{LLAMA_CPP_PYTHON}"
    yield Finding("build", ", ".join(sorted(used)), advice)


def features_used(info: str) -> set[str]:
    """The names that llama.cpp's system info says are on: `CPU : AVX = 1 | AVX2 = 1 | `."""
    parts = [part.rpartition(":")[2].partition("=") for part in info.split("|")]
    return {name.strip() for name, _, value in parts if value.strip() == "1"}


def features_unused(used: set[str], flags: set[str]) -> list[str]:
    """Of what matters for speed, what the processor has and the build does not use."""
    return [name for name, flag in _FEATURES.items() if flag in flags and name not in used]


def _cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> set[str]:
    """Empty where the system does not tell."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return {flag for line in lines if line.lower().startswith(("flags", "features"))
            for flag in line.partition(":")[2].split()}  # fmt: skip


def processor() -> Iterator[Finding]:
    """Its cores, and whether others use them."""
    from ..bench.table import machine
    from ..loading.cores import physical_cores

    advice, busy = "", os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if busy > 0.5 * physical_cores():
        advice = (
            f"other programs use {busy:.1f} of them: llama.cpp's threads wait for each other, so "
            "one busy core can halve the speed; -t takes fewer"
        )
    yield Finding("processor", machine(), advice)


def memory() -> Iterator[Finding]:
    """How much a model may take, and how fast it is read: that bounds a model on the CPU."""
    from ..offload.advice import gib
    from ..placement.host_memory import host

    found = host()
    free = "unknown" if found.available is None else gib(found.available)
    yield Finding("memory", f"{free} available, read at {found.bandwidth / 1e9:.0f} GB/s")


def devices() -> Iterator[Finding]:
    """Cards that llama.cpp can use, and cards that it could."""
    from ..llama import devices as found
    from ..offload.advice import gib

    known = found()
    advice = ""
    for program, backend in _CARDS.items():
        if not known and shutil.which(program):
            advice = (
                f"{program} is here, but llama.cpp was built without a backend for the card: set "
                f'CMAKE_ARGS="-DGGML_{backend}=ON -DGGML_RPC=ON" and reinstall llama-cpp-python'
            )
    listed = ", ".join(f"{one.name} with {gib(one.free)} free" for one in known)
    yield Finding("devices", listed or "none besides the CPU", advice)


def rpc() -> Iterator[Finding]:
    """Whether `worker` and `--rpc` can work."""
    from ..llama.rpc import is_built

    if is_built():
        yield Finding("rpc", "built in: `gguf-mtp worker` can lend this machine's memory")
    else:
        how = 'set CMAKE_ARGS="-DGGML_RPC=ON" and reinstall llama-cpp-python'
        yield Finding("rpc", "not built in", f"to use several machines, {how}")


def folders() -> Iterator[Finding]:
    """Where things are kept, and how much room there is."""
    from huggingface_hub.constants import HF_HUB_CACHE
    from platformdirs import user_cache_dir

    from ..offload.advice import gib

    for subject, path in (("cache", Path(user_cache_dir("gguf-mtp"))), ("hub", Path(HF_HUB_CACHE))):
        there = next(folder for folder in (path, *path.parents) if folder.exists())
        advice = "" if os.access(there, os.W_OK) else f"{there} cannot be written"
        yield Finding(
            subject, f"{path}, {gib(shutil.disk_usage(there).free)} free", advice, bool(advice)
        )


def drafting() -> Iterator[Finding]:
    """Whether the demo's block drafts on this build."""
    from ..demo import demo_model
    from ..loading.cores import physical_cores
    from .selftest import self_test

    result = self_test(demo_model(), "mtp", physical_cores())
    advice = ""
    if result.is_broken:
        advice = "no draft of the demo's MTP block was accepted: reinstall llama-cpp-python"
    yield Finding("demo", result.sentence, advice, result.is_broken)
