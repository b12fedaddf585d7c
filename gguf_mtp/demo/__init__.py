"""The demo model: a small DeepSeek-V3 checkpoint, converted on first use into the user's cache.

A cached file's name carries the converter's version and the checkpoint's hash, so it is made again
exactly when one of them changes; its own hash lies beside it, so a damaged file is noticed and made
again. Each process converts into a folder of its own and renames, so two at once both end well.

It knows nothing of the run time.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from platformdirs import user_cache_dir

from gguf_mtp.converters import CONVERTER_VERSION

if TYPE_CHECKING:
    from gguf_mtp.converters.convert import Progress

CHECKPOINT = Path(__file__).parent / "checkpoint"

logger = logging.getLogger(__name__)

_WORK = ".converting-"
_STALE_S = 3600.0
_CHUNK = 1 << 20


def demo_model(
    cache: Path | None = None,
    progress: Callable[[Progress], None] | None = None,
    kind: str = "q8_0",
) -> Path:
    """The demo as a GGUF file of type `kind`, converted first when it has to be.

    `cache` is the user's cache folder by default; where it cannot be written, a folder for
    temporary files is used instead and a warning says so.
    Raises `ConversionError` when the disk is full.
    """

    def make(out: Path) -> None:
        from gguf_mtp.converters.convert import ConvertOptions, convert

        convert(CHECKPOINT, out, ConvertOptions(type=kind, name="gguf-mtp demo"), progress)

    return cached(f"demo-{kind}-v{CONVERTER_VERSION}", make, cache)


def cached(stem: str, make: Callable[[Path], None], cache: Path | None = None) -> Path:
    """The GGUF file `stem` made from the demo's checkpoint, by `make(path)` when it has to be.

    `make` writes to a path in a folder of its own, which goes with all else that it left there.
    """
    cache = cache or Path(user_cache_dir("gguf-mtp"))
    name = f"{stem}-{_hash(*sorted(CHECKPOINT.iterdir()))[:12]}.gguf"
    if _is_whole(cache / name):
        return cache / name
    try:
        work = _work_folder(cache)
    except OSError as error:
        fallback = _temporary_folder()
        logger.warning("cannot write to the cache %s (%s), using %s", cache, error, fallback)
        cache = fallback
        if _is_whole(cache / name):
            return cache / name
        work = _work_folder(cache)
    try:
        make(work / name)
        _hash_file(work / name).write_text(_hash(work / name))
        # The hash goes first: a file without it is made again, a file with another's is too.
        for file in (_hash_file(work / name), work / name):
            file.replace(cache / file.name)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return cache / name


def _is_whole(path: Path) -> bool:
    try:
        return _hash_file(path).read_text() == _hash(path)
    except OSError:
        return False


def _hash_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _hash(*paths: Path) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while part := file.read(_CHUNK):
                digest.update(part)
    return digest.hexdigest()


def _work_folder(cache: Path) -> Path:
    """A new folder inside the cache; what a killed process left there goes."""
    cache.mkdir(parents=True, exist_ok=True)
    for old in cache.glob(f"{_WORK}*"):
        if time.time() - old.stat().st_mtime > _STALE_S:
            shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=_WORK, dir=cache))


def _temporary_folder() -> Path:
    """A folder of this user's among the temporary files, kept from run to run where it is ours."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    folder = Path(tempfile.gettempdir()) / f"gguf-mtp-{user}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if stat.S_ISDIR(status.st_mode) and getattr(status, "st_uid", user) == user:
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="gguf-mtp-"))
