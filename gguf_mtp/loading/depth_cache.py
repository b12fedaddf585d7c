"""What the depth decision has learned, kept in a file from one run to the next.

Costs belong to a model file on a machine with a set of options: all of them are in the file's name.
A file that cannot be read or written is no error: the next run measures again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from pathlib import Path

from gguf_mtp.depth import AutoDepth, export_state, import_state

log = logging.getLogger(__name__)

N_KEPT = 64
"""Files of a folder that stay, the newest ones: each model, machine and set of options has one."""


def file_for(folder: Path, *keys: object) -> Path:
    """Where the state for these keys lies."""
    name = hashlib.sha256(repr(keys).encode()).hexdigest()[:20]
    return folder / f"{name}.json"


def load_depth(depth: AutoDepth, file: Path) -> None:
    """Starts `depth` from what an earlier run stored, if that is there and sound."""
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        log.debug("no stored depth state: %s", error)
        return
    refused = import_state(depth, state)
    if refused:
        log.debug("%s: %s", file, refused)


def save_depth(depth: AutoDepth, file: Path) -> None:
    """Stores what `depth` has learned, replacing the file in one step."""
    state = export_state(depth)
    if state is None:
        return
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(state), encoding="utf-8")
        partial.replace(file)
        _prune(file.parent)
    except OSError as error:
        log.debug("the depth state was not stored: %s", error)


def _prune(folder: Path) -> None:
    """Removes all but the newest files, and partial ones that a killed run has left."""
    files = sorted(folder.glob("*.json"), key=lambda file: -file.stat().st_mtime)
    day_ago = time.time() - 86_400
    stale = [file for file in folder.glob(".*.json.*") if file.stat().st_mtime < day_ago]
    for file in (*files[N_KEPT:], *stale):
        file.unlink(missing_ok=True)
