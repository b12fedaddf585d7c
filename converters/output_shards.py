"""One output as one file or as shards, cut and named as gguf-split does; whole or not there at all.

Every shard is written under a temporary name; names are given when all are whole, the first shard's
last, so that the name a user loads stands for a complete set. An interrupted run goes on in the
shard it was in.

It knows nothing of what the bytes mean.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from ..errors import ConversionError
from .gguf_file import pad
from .resume_file import Leftovers, PartialFile, is_named, journal_path, partial_path, read_journal

__all__ = ["OutFile", "cut", "parse_size", "paths", "refuse_stale", "write"]

_MAX_SHARDS = 65_535  # split.count has 16 bits


class OutFile(NamedTuple):
    """`ends[i]` is the file's length when tensor i is whole; the last is its size."""

    path: Path
    ends: Sequence[int]


def parse_size(text: str) -> int:
    """Bytes of `300M` or `40G`: as gguf-split, in powers of ten. Raises `ConversionError`."""
    match = re.fullmatch(r"(\d+)([MG])", text)
    if not match or int(match[1]) == 0:
        raise ConversionError(f"the shard size {text!r} is not a number with M or G, like 40G")
    return int(match[1]) * {"M": 10**6, "G": 10**9}[match[2]]


def cut(sizes: Sequence[int], most: int | None) -> list[slice]:
    """Consecutive runs of tensors with at most `most` padded bytes (or one tensor) each."""
    if most is None:
        return [slice(0, len(sizes))]
    bounds, total = [0], 0
    for i, n in enumerate(map(pad, sizes)):
        total += n
        if total > most and i > bounds[-1]:
            bounds.append(i)
            total = n
    if len(bounds) > _MAX_SHARDS:
        raise ConversionError(
            f"{most} bytes per shard make {len(bounds)} shards, more than {_MAX_SHARDS}"
        )
    return [slice(a, b) for a, b in zip(bounds, [*bounds[1:], len(sizes)], strict=True)]


def paths(out: Path, n: int) -> list[Path]:
    """`out` itself, or the names that llama.cpp finds `n` shards by."""
    if n == 1:
        return [out]
    stem = out.name.removesuffix(".gguf")
    return [out.with_name(f"{stem}-{i:05d}-of-{n:05d}.gguf") for i in range(1, n + 1)]


def refuse_inputs(out: Path, inputs: Iterable[str | Path]) -> None:
    """Raises `ConversionError` when `out`, or what may be removed beside it, is read for it."""
    read = [Path(path) for path in inputs]
    for path in (out, *_stale(out, ())):
        if path.exists() and any(path.samefile(other) for other in read):
            raise ConversionError(f"{path} is an input; give the output another name")


def refuse_stale(out: Path, files: Sequence[Path]) -> None:
    """Raises `ConversionError` when shards of another split of `out` would stay beside the new."""
    if stale := _stale(out, files):
        raise ConversionError(
            f"{stale[0]} is left from another split of {out.name}"
            + (f" ({len(stale)} files in all)" if len(stale) > 1 else "")
            + "; --force replaces it"
        )


def _stale(out: Path, files: Sequence[Path]) -> list[Path]:
    ours = {f(path) for path in files for f in (Path, partial_path, journal_path)}
    pattern = re.compile(
        re.escape(out.name.removesuffix(".gguf")) + r"-\d{5}-of-\d{5}\.gguf(\.partial.*)?"
    )
    found = (path for path in out.parent.iterdir() if pattern.fullmatch(path.name))
    return sorted(path for path in found if path not in ours)


def write(
    out: Path,
    files: Sequence[OutFile],
    fingerprint: str,
    leftovers: Leftovers,
    fill: Callable[[int, PartialFile], None],
) -> None:
    """Let `fill(i, partial)` write what is missing of each file, then give all their names.

    Raises `ConversionError`: nothing is left behind when `fill` raised it; after an `OSError` what
    was written stays for "resume". "discard" also removes shards of another split.
    """
    names = [file.path for file in files]
    _check(out, files, fingerprint, leftovers)
    with ExitStack() as stack:
        opened = [
            stack.enter_context(_open(file, fingerprint, leftovers))
            for file in files
            if not (leftovers == "resume" and is_named(file.path, fingerprint, file.ends))
        ]
        numbers = {partial.out: names.index(partial.out) for partial in opened}
        try:
            for partial in opened:
                fill(numbers[partial.out], partial)
                partial.settle()
            for partial in reversed(opened):
                partial.name()
        except ConversionError:
            for partial in opened:
                partial.discard()
            raise
        except OSError as error:
            n_done = sum(partial.n_done for partial in opened)
            n_all = sum(len(file.ends) for file in files)
            raise ConversionError(
                f"{error.filename or out}: {error.strerror}; {partial_path(names[0])} keeps "
                f"{n_done} of {n_all} tensors; --resume continues from there"
            ) from None
    for path in names:
        journal_path(path).unlink(missing_ok=True)
    if leftovers == "discard":
        for path in _stale(out, names):
            path.unlink()


def _check(out: Path, files: Sequence[OutFile], fingerprint: str, leftovers: Leftovers) -> None:
    """Refuse before the first file is touched."""
    names = [file.path for file in files]
    if leftovers != "discard":
        refuse_stale(out, names)
    if leftovers == "refuse":
        for path in names:
            if (left := read_journal(path)) and left.n_done:
                raise ConversionError(
                    f"{partial_path(path)} is left from an interrupted run; --resume continues "
                    "it, --force starts over"
                )
    if leftovers == "resume":
        for path in names:
            if (left := read_journal(path)) and left.n_done and left.fingerprint != fingerprint:
                raise ConversionError(
                    f"{partial_path(path)} was started from another checkpoint or with other "
                    "options; --force starts over"
                )


def _open(file: OutFile, fingerprint: str, leftovers: Leftovers) -> PartialFile:
    try:
        return PartialFile(file.path, fingerprint, file.ends, leftovers)
    except OSError as error:
        raise ConversionError(f"cannot write {file.path}: {error.strerror}") from None
