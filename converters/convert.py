"""The pipeline: plan, check that it fits, write in one pass, account for every tensor.

Writing goes to a temporary name beside the output: header first, then tensors in order, fsync,
rename. So a file with the output's name is always whole, and an interrupted run can go on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from ..types import Floats
from . import estimate, output_shards
from .gguf_file import TypedTensor
from .planning import (
    Account,
    ConversionJob,
    ConvertOptions,
    Shard,
    needs_importance,
    plan,
    side_path,
)
from .quantize import Encoder, Ggml, tasks
from .resume_file import Leftovers, PartialFile, check_place
from .row_reader import RowReader

__all__ = [
    "Account",
    "ConversionJob",
    "ConvertOptions",
    "Progress",
    "check_place",
    "convert",
    "plan",
    "side_path",
    "write",
]

logger = logging.getLogger(__name__)


class Progress(NamedTuple):
    """`n_done` of `n_total` output bytes are there; `tensor` is the last that was worked on."""

    tensor: str
    n_done: int
    n_total: int


def convert(
    source: Path,
    out: Path,
    options: ConvertOptions,
    progress: Callable[[Progress], None] | None = None,
) -> Account:
    """Write the checkpoint in the folder `source` as the GGUF file `out`, replacing it when whole;
    and its drafter beside it (`side_path`) where that cannot be part of it.

    Raises `ConversionError` with the file, key or tensor in it. Nothing is written when the
    checkpoint is at fault; when a disk is, what was written stays as `out`.partial for `resume`.
    """
    check_place(out)
    with plan(source, options) as job:
        for _, output in job.outputs(out):
            for note in output.account.notes:
                logger.info("%s", note)
            for name, reason in output.account.dropped.items():
                logger.info("dropped %s: %s", name, reason)
        write(job, out, options, progress)
        return job.account


def write(
    job: ConversionJob,
    out: Path,
    options: ConvertOptions,
    progress: Callable[[Progress], None] | None = None,
) -> None:
    """Carry a planned conversion out: every file of it, or none."""
    files = job.files(out)
    if not options.force:
        estimate.check_disk(out, [file.path for file in files], job.n_bytes)
    encoder = Encoder(RowReader(job.checkpoint), Ggml(), options.threads)
    starts = [0, *accumulate(file.ends[-1] for file in files)]

    def fill(i: int, file: PartialFile) -> None:
        def report(tensor: str, done: int) -> None:
            if progress:
                progress(Progress(tensor, starts[i] + done, starts[-1]))

        _fill(job, job.shards[i], file, encoder, report)

    leftovers: Leftovers = "resume" if options.resume else "discard" if options.force else "refuse"
    output_shards.write(out, files, job.fingerprint, leftovers, fill)


def _fill(
    job: ConversionJob,
    shard: Shard,
    file: PartialFile,
    encoder: Encoder,
    report: Callable[[str, int], None],
) -> None:
    ends = shard.ends
    if file.n_done:
        done = ends[file.n_done - 1]
        logger.info("resuming after %d of %d tensors", file.n_done, len(ends))
    else:
        file.write(memoryview(shard.header))
        done = len(shard.header)
    todo = (
        task
        for placed in shard.tensors[file.n_done :]
        for task in tasks(placed, _importance(job, placed))
    )
    for task, data in encoder.stream(todo):
        file.write(data.data)
        done += len(data)
        if task.is_last:
            file.write(memoryview(bytes(ends[file.n_done] - done)))
            done = ends[file.n_done]
            file.complete()
        report(task.placed.tensor.name, done)


def _importance(job: ConversionJob, placed: TypedTensor) -> Floats | None:
    if job.imatrix is None or not needs_importance(placed):
        return None
    return job.imatrix.values(placed.tensor)
