"""The pipeline: plan, check that it fits, write in one pass, account for every tensor.

Writing goes to a temporary name beside the output: header first, then tensors in order, fsync,
rename. So a file with the output's name is always whole, and an interrupted run can go on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ..errors import ConversionError
from ..types import Floats
from . import estimate
from .gguf_file import TypedTensor
from .job import Account, ConvertOptions, Job, needs_importance, plan
from .output import Leftovers, PartialFile, check_place, partial_path
from .quantize import Encoder, Ggml, tasks
from .rows import RowReader

__all__ = [
    "Account",
    "ConvertOptions",
    "Job",
    "Progress",
    "check_place",
    "convert",
    "plan",
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
    """Write the checkpoint in the folder `source` as the GGUF file `out`, replacing it when whole.

    Raises `ConversionError` with the file, key or tensor in it. Nothing is written when the
    checkpoint is at fault; when a disk is, what was written stays as `out`.partial for `resume`.
    """
    check_place(out)
    with plan(source, options) as job:
        for note in job.account.notes:
            logger.info("%s", note)
        for name, reason in job.account.dropped.items():
            logger.info("dropped %s: %s", name, reason)
        write(job, out, options, progress)
        return job.account


def write(
    job: Job,
    out: Path,
    options: ConvertOptions,
    progress: Callable[[Progress], None] | None = None,
) -> None:
    """Carry a planned conversion out."""
    if not options.force:
        estimate.check_disk(out, job.ends[-1])
    encoder = Encoder(RowReader(job.checkpoint), Ggml(), options.threads)
    with _open(job, out, options) as file:
        try:
            _fill(job, file, encoder, progress)
            file.finish()
        except ConversionError:
            file.discard()
            raise
        except OSError as error:
            raise ConversionError(
                f"{error.filename or out}: {error.strerror}; {partial_path(out)} keeps "
                f"{file.n_done} of {len(job.tensors)} tensors, --resume goes on with them"
            ) from None


def _open(job: Job, out: Path, options: ConvertOptions) -> PartialFile:
    leftovers: Leftovers = "resume" if options.resume else "discard" if options.force else "refuse"
    try:
        return PartialFile(out, job.fingerprint, job.ends, leftovers)
    except OSError as error:
        raise ConversionError(f"cannot write {out}: {error.strerror}") from None


def _fill(
    job: Job,
    file: PartialFile,
    encoder: Encoder,
    progress: Callable[[Progress], None] | None,
) -> None:
    ends = job.ends
    if file.n_done:
        done = ends[file.n_done - 1]
        logger.info("going on after %d of %d tensors", file.n_done, len(ends))
    else:
        file.write(memoryview(job.header))
        done = len(job.header)
    todo = (
        task
        for placed in job.tensors[file.n_done :]
        for task in tasks(placed, _importance(job, placed))
    )
    for task, data in encoder.stream(todo):
        file.write(data.data)
        done += len(data)
        if task.is_last:
            file.write(memoryview(bytes(ends[file.n_done] - done)))
            done = ends[file.n_done]
            file.complete()
        if progress:
            progress(Progress(task.placed.tensor.name, done, ends[-1]))


def _importance(job: Job, placed: TypedTensor) -> Floats | None:
    if job.imatrix is None or not needs_importance(placed):
        return None
    return job.imatrix.values(placed.tensor)
