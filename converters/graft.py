"""MTP blocks moved between GGUF files, byte for byte: grafted behind a trunk, or taken out of it.

What users hold are files of hundreds of gigabytes without the block; nothing is quantised again
here. Whether a block belongs to a model is decided by `side_file`, before anything is written.

It knows headers, and bytes as bytes.
"""

from __future__ import annotations

import errno
import hashlib
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from ..errors import ConversionError
from ..gguf import model_facts, side_file
from ..gguf.ggml_types import TENSOR_TYPES
from ..gguf.header import raw_metadata
from ..types import ModelFacts, TensorInfo
from . import estimate, output_shards
from .gguf_file import HeaderEntry, header, offsets, pad, split_keys
from .resume_file import Leftovers, PartialFile, check_place

__all__ = ["Copied", "CopyOptions", "extract", "graft"]

_NUMBERS = {kind.name: number for number, kind in TENSOR_TYPES.items()}
_APART = ("deepseek4",)
"""Architectures whose block has tensors under the trunk's names."""
_CHUNK = 1 << 23
# Written anew, for the shards and the alignment of the output.
_OF_THE_FILE = ("split.no", "split.count", "split.tensors.count", "general.alignment")

Report = Callable[[str, int, int], None]
"""A tensor's name, the bytes done, the bytes of all."""


@dataclass(frozen=True, slots=True)
class CopyOptions:
    """`split` is the most bytes of tensors in one file. `resume` goes on with an interrupted run;
    `force` starts over, and though the disk looks too small."""

    split: int | None = None
    resume: bool = False
    force: bool = False


class Copied(NamedTuple):
    """What was written: its first file, tensors and bytes, and remarks worth a line."""

    path: Path
    n_tensors: int
    n_bytes: int
    remarks: list[str]


def graft(
    base: Path, mtp: Path, out: Path, options: CopyOptions, report: Report | None = None
) -> Copied:
    """Write the model in `base` with the MTP block in `mtp` behind it as `out`.

    `mtp` is a side file or another file of the same model; both may be split. Raises `ModelError`
    when the block does not belong to the model, `ConversionError` when the output cannot be made.
    """
    check_place(out)
    model, side = model_facts.read(base), side_file.read(mtp)
    output_shards.refuse_inputs(
        out, {base, mtp, *(t.file for t in (*model.tensors, *side.tensors))}
    )
    if model.architecture in _APART:
        raise ConversionError(
            f"{mtp} must stay a file of its own: in one file llama.cpp would draft with the "
            f"model's output_hc_* instead of the block's; as mtp-{base.name} beside it it is found"
        )
    i = model.n_layer
    if any(t.name.startswith(f"blk.{i}.") for t in model.tensors):
        raise ConversionError(f"{base} already has a block after its {i} layers")
    remarks = side_file.check(model, side)
    counts = {f"{model.architecture}.{key}" for key in ("block_count", "nextn_predict_layers")}
    for key, value in model.kv.items():
        per_layer = isinstance(value, list) and len(value) in (i, i + 1)
        if per_layer and key.startswith(f"{model.architecture}.") and key not in counts:
            raise ConversionError(
                f"{base} has one {key} per layer, but the MTP block would have none"
            )
    kv = raw_metadata(base)
    for key, n in (("block_count", i + 1), ("nextn_predict_layers", 1)):
        kv[f"{model.architecture}.{key}"] = struct.pack("<II", 4, n)
    tensors = [*model.tensors, *_block(side)]
    return _copy(kv, tensors, out, options, report)._replace(remarks=remarks)


def extract(model: Path, out: Path, options: CopyOptions, report: Report | None = None) -> Copied:
    """Write the MTP block in `model` as a side file: with embedding, norm and head, which llama.cpp
    wants in every file. Raises as `graft`."""
    check_place(out)
    facts = side_file.read(model)
    output_shards.refuse_inputs(out, {model, *(t.file for t in facts.tensors)})
    shared = ("token_embd.weight", "output_norm.weight", "output.weight")
    tensors = [*(t for t in facts.tensors if t.name in shared), *_block(facts)]
    return _copy(raw_metadata(model), tensors, out, options, report)


def _block(facts: ModelFacts) -> Iterable[TensorInfo]:
    return (t for t in facts.tensors if t.name.startswith(f"blk.{facts.n_layer}."))


class _CopyPart(NamedTuple):
    """One output file."""

    header: bytes
    tensors: Sequence[TensorInfo]

    @property
    def ends(self) -> list[int]:
        starts = offsets([t.n_bytes for t in self.tensors])
        return [
            len(self.header) + start + pad(t.n_bytes)
            for start, t in zip(starts, self.tensors, strict=True)
        ]


def _copy(
    kv: dict[str, bytes],
    tensors: Sequence[TensorInfo],
    out: Path,
    options: CopyOptions,
    report: Report | None,
) -> Copied:
    parts = _parts(kv, tensors, options.split)
    names = output_shards.paths(out, len(parts))
    files = [output_shards.OutFile(*f) for f in zip(names, (p.ends for p in parts), strict=True)]
    starts = [0, *accumulate(file.ends[-1] for file in files)]
    if not options.force:
        estimate.check_disk(out, names, starts[-1])
    with ExitStack() as stack:
        reader = _Reader(stack)

        def fill(i: int, file: PartialFile) -> None:
            done = starts[i] + (files[i].ends[file.n_done - 1] if file.n_done else 0)
            for tensor, n in _fill(parts[i], file, reader):
                done += n
                if report:
                    report(tensor, done, starts[-1])

        leftovers: Leftovers = (
            "resume" if options.resume else "discard" if options.force else "refuse"
        )
        output_shards.write(out, files, _fingerprint(parts), leftovers, fill)
    return Copied(names[0], len(tensors), starts[-1], [])


def _parts(
    kv: dict[str, bytes], tensors: Sequence[TensorInfo], most: int | None
) -> list[_CopyPart]:
    kept = {key: value for key, value in kv.items() if key not in _OF_THE_FILE}
    runs = [tensors[s] for s in output_shards.cut([t.n_bytes for t in tensors], most)]
    parts = []
    for i, run in enumerate(runs):
        keys = (kept if i == 0 else {}) | split_keys(i, len(runs), len(tensors))
        places = offsets([t.n_bytes for t in run])
        entries = [
            HeaderEntry(t.name, t.shape[::-1], _NUMBERS[t.type], place)
            for t, place in zip(run, places, strict=True)
        ]
        parts.append(_CopyPart(header(keys, entries), run))
    return parts


class _Reader:
    """Bytes of the input files, opened once each; closed with `stack`."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._fds: dict[str, int] = {}
        self._buffer = bytearray(_CHUNK)

    def read(self, path: str, at: int, n: int) -> memoryview:
        """Up to `_CHUNK` of `n` bytes, valid until the next call."""
        if path not in self._fds:
            self._fds[path] = os.open(path, os.O_RDONLY)
            self._stack.callback(os.close, self._fds[path])
        view = memoryview(self._buffer)[: min(n, _CHUNK)]
        try:
            got = os.preadv(self._fds[path], [view], at)
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from None
        if got == 0:
            raise OSError(errno.EIO, "the file became shorter while it was read", path)
        return view[:got]


def _fill(part: _CopyPart, file: PartialFile, reader: _Reader) -> Iterable[tuple[str, int]]:
    """Write what is missing; yields each tensor's name with the bytes that were added."""
    if file.n_done == 0:
        file.write(memoryview(part.header))
        yield "", len(part.header)
    for tensor in part.tensors[file.n_done :]:
        done = 0
        while done < tensor.n_bytes:
            data = reader.read(tensor.file, tensor.offset + done, tensor.n_bytes - done)
            n = len(data)
            file.write(data)
            done += n
            yield tensor.name, n
        file.write(memoryview(bytes(pad(done) - done)))
        file.complete()
        yield tensor.name, pad(done) - done


def _fingerprint(parts: Sequence[_CopyPart]) -> str:
    digest = hashlib.sha256(b"".join(part.header for part in parts))
    for path in sorted({t.file for part in parts for t in part.tensors}):
        status = Path(path).stat()
        digest.update(os.fsencode(f"{path} {status.st_size} {status.st_mtime_ns} "))
    return digest.hexdigest()
