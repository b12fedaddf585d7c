"""`gguf-mtp --version`: what is installed, without loading it."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

import pytest
from typer.testing import CliRunner

from gguf_mtp.cli import app as cli

LINE = f"gguf-mtp {version('gguf-mtp')}, llama-cpp-python {version('llama-cpp-python')}\n"


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_both_versions_in_one_line(option: str) -> None:
    done = CliRunner().invoke(cli.app, [option])
    assert (done.exit_code, done.stdout, done.stderr) == (0, LINE, "")


def test_it_comes_before_whatever_else_is_asked_and_loads_nothing() -> None:
    code = (
        "import sys; from gguf_mtp.cli.app import app\n"
        "try: app(['-V', 'run', '--no-such-option'])\n"
        "finally: print(sorted({'llama_cpp', 'numpy', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{LINE}[]\n", "")


def test_a_library_that_is_not_installed_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(name: str) -> str:
        if name == "llama-cpp-python":
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr("importlib.metadata.version", found)
    done = CliRunner().invoke(cli.app, ["--version"])
    assert done.exit_code == 0
    assert done.stdout.endswith("llama-cpp-python (not installed)\n")
