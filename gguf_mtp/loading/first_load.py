"""Is a file safe to load? One that was not loaded here before is loaded in a child process first.

`gguf` refuses in words what is known to end the process inside llama.cpp; this finds the rest: the
child (`llama.first_load`) ends, and its last words become a sentence. A file that came through is
remembered by its contents, so the check costs time once. One that did not is tried again next time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from platformdirs import user_cache_dir

from gguf_mtp.child import run_module
from gguf_mtp.errors import LoadFailed, UnsupportedModel
from gguf_mtp.gguf.model_facts import is_side_file
from gguf_mtp.llama.first_load import DONE, REFUSED
from gguf_mtp.placement import host_memory
from gguf_mtp.types import ModelFacts

__all__ = ["FirstLoad", "check"]

log = logging.getLogger(__name__)

MOST_BYTES = 8 << 30
"""Weights that are read for the check; of larger files the graph is made, but nothing computed."""
SECONDS, BYTES_PER_S = 60.0, 50e6
"""What a first load may take: this long, and longer for weights on a slow disk."""
_SAMPLES, _SAMPLE = 8, 1 << 16
_KILLED = -9


class FirstLoad(NamedTuple):
    """A file to load. `with_block`: its MTP block will be loaded and run too."""

    facts: ModelFacts
    with_block: bool

    @property
    def n_bytes(self) -> int:
        return sum(tensor.n_bytes for tensor in self.facts.tensors)


def check(files: Sequence[FirstLoad], folder: Path | None = None, always: bool = False) -> None:
    """Loads each file in a child process, unless `folder` remembers that it came through.

    `folder` is in the user's cache by default; with `always` nothing is taken from it. Raises
    `UnsupportedModel` where llama.cpp ends the process or never comes back, and `LoadFailed` where
    it refuses the file.
    """
    folder = folder or Path(user_cache_dir("gguf-mtp")) / "loaded"
    for file in files:
        mark = folder / _name_of(file)
        if not always and mark.exists():
            continue
        if _load(file):
            _remember(mark)


def _load(file: FirstLoad) -> bool:
    """False when nothing can be said about the file."""
    room = host_memory.available()
    has_weights = file.n_bytes <= min(MOST_BYTES, MOST_BYTES if room is None else room // 2)
    facts = file.facts
    request = {
        "path": str(Path(facts.path).absolute()),
        "load_mtp": file.with_block,
        "has_trunk": not is_side_file(facts),
        "has_weights": has_weights,
    }
    seconds = SECONDS + file.n_bytes / BYTES_PER_S * has_weights
    try:
        done = run_module("gguf_mtp.llama.first_load", json.dumps(request).encode(), seconds)
    except subprocess.TimeoutExpired as error:
        step = _last_line(error.stdout or b"") or "starting"
        raise UnsupportedModel(
            f"{facts.path} cannot be run: llama.cpp did not finish {step} within {seconds:.0f} s"
        ) from None
    except OSError as error:
        log.warning("cannot start a process to check %s: %s", facts.path, error)
        return False
    said = _last_line(done.stdout)
    if said.startswith(REFUSED):
        raise LoadFailed(json.loads(said.removeprefix(REFUSED)))
    if said == DONE:
        return True
    if done.returncode == _KILLED:
        log.warning("the process that checked %s was killed while %s", facts.path, said)
        return False
    raise UnsupportedModel(
        f"{facts.path} cannot be run: llama.cpp ended the process while {said or 'starting'} "
        f"({_last_words(done.stderr) or f'exit code {done.returncode}'})"
    )


def _last_line(output: bytes) -> str:
    lines = output.decode(errors="replace").splitlines()
    return next((line for line in reversed(lines) if line), "")


def _last_words(stderr: bytes) -> str:
    """The assertion that failed or what was thrown; without one, nothing."""
    lines = [line.strip() for line in stderr.decode(errors="replace").splitlines()]
    for what in ("GGML_ASSERT", "what():", ".cpp:", ".c:"):
        for line in lines:
            if what in line:
                return line.rsplit("/", 1)[-1].removeprefix("what():").strip()[:200]
    return ""


def _name_of(file: FirstLoad) -> str:
    """Names the contents: the whole header, samples of the data, and who loads them."""
    digest = hashlib.sha256(version("llama-cpp-python").encode())
    tensors = file.facts.tensors
    for path in sorted({tensor.file for tensor in tensors}):
        end = min(tensor.offset for tensor in tensors if tensor.file == path)
        with Path(path).open("rb") as stream:
            digest.update(stream.read(end))
            size = stream.seek(0, os.SEEK_END)
            digest.update(str(size).encode())
            for part in range(_SAMPLES):
                stream.seek(size * part // _SAMPLES)
                digest.update(stream.read(_SAMPLE))
    return f"{digest.hexdigest()[:32]}{'-mtp' if file.with_block else ''}"


def _remember(mark: Path) -> None:
    with suppress(OSError):
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
