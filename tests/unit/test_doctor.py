"""What `gguf-mtp doctor` concludes from what it finds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gguf_mtp.cli.doctor import Finding, _cpu_flags, _safely, features_unused, features_used

ROOT = Path(__file__).parents[2]


def test_a_build_that_uses_less_than_the_processor_has(tmp_path: Path) -> None:
    info = "CUDA : ARCHS = 890 | CPU : SSE3 = 1 | AVX = 1 | AVX2 = 0 | FMA = 1 | OPENMP = 1 | "
    used = features_used(info)
    assert used == {"SSE3", "AVX", "FMA", "OPENMP"}
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu avx avx2 fma avx512f\n")
    assert features_unused(used, _cpu_flags(cpuinfo)) == ["AVX2", "AVX512"]
    assert features_unused(used, _cpu_flags(tmp_path / "none")) == []


def test_an_arm_processor_is_read_too(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("Features\t: fp asimd asimddp i8mm\n")
    assert features_unused({"NEON", "DOTPROD"}, _cpu_flags(cpuinfo)) == ["MATMUL_INT8"]


def test_a_check_that_fails_is_a_finding() -> None:
    def broken() -> Iterator[Finding]:
        yield Finding("first", "fine")
        raise OSError("no such thing")

    assert list(_safely(broken)) == [
        Finding("first", "fine"),
        Finding("broken", "cannot be checked: no such thing", is_broken=True),
    ]


@pytest.mark.package
def test_without_llama_cpp_it_says_so_in_one_sentence() -> None:
    program = "import sys; sys.modules['llama_cpp'] = None\n"
    program += "from gguf_mtp.cli.app import main\nsys.argv[1:] = {}; main()"
    for arguments in (["run", "-p", "x"], ["chat"]):
        done = subprocess.run(
            [sys.executable, "-c", program.format(arguments)],
            cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == (
            "error: llama-cpp-python is not installed: pip install llama-cpp-python\n"
        )
    done = subprocess.run(
        [sys.executable, "-c", program.format(["doctor"])],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert "build       cannot be checked: " in done.stdout
    assert "Traceback" not in done.stderr
