"""The pipeline: open a checkpoint, adapt it, choose types, write, account for all tensors.

Planning reads headers only and fails before anything is written. Writing goes to a temporary name
beside the output: header first, then tensors in order, fsync, rename. So a file with the output's
name is always whole.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ..errors import ConversionError
from . import CONVERTER_VERSION, deepseek, recipes
from .checkpoint import Checkpoint
from .gguf_file import TypedTensor, header, pad, place
from .plan import Adapted, Value
from .quantize import Encoder, Ggml, tasks
from .rows import RowReader
from .tokenizer import vocabulary

logger = logging.getLogger(__name__)

_QUANTIZATION_VERSION = 2


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """What to make of a checkpoint.

    `type` names a recipe; `tensor_types` are PATTERN=TYPE, the first match wins; `draft_head` gives
    the MTP block a head of its own in that type; `mtp` False leaves the block out; `n_threads` 0
    takes every core; `name` is the model's name, the folder's by default.
    """

    type: str = "q8_0"
    tensor_types: tuple[str, ...] = ()
    draft_head: str | None = None
    mtp: bool = True
    n_threads: int = 0
    name: str | None = None


class Progress(NamedTuple):
    """`n_done` of `n_total` output bytes are written; `tensor` was the last."""

    tensor: str
    n_done: int
    n_total: int


@dataclass(frozen=True, slots=True)
class Account:
    """Where everything went: `n_read` = `n_written` + `n_merged` + len(`dropped`) source tensors.

    `dropped` maps names to reasons. Bytes are those of the output. `mtp_block` is the number of the
    block that holds the MTP tensors, None without one.
    """

    n_read: int
    n_written: int
    n_merged: int
    dropped: dict[str, str]
    n_tensors: int
    n_bytes: int
    bytes_by_type: dict[str, int]
    mtp_block: int | None
    mtp_bytes: int
    notes: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Job:
    """A conversion that has been planned and not begun."""

    checkpoint: Checkpoint
    header: bytes
    tensors: tuple[TypedTensor, ...]
    account: Account

    @property
    def n_bytes(self) -> int:
        """Size of the output file."""
        return len(self.header) + sum(pad(t.n_bytes) for t in self.tensors)


def convert(
    source: Path,
    out: Path,
    options: ConvertOptions,
    progress: Callable[[Progress], None] | None = None,
) -> Account:
    """Write the checkpoint in the folder `source` as the GGUF file `out`, replacing it when whole.

    Raises `ConversionError` with the file or tensor in it; no file is left behind then.
    """
    with plan(source, options) as job:
        for note in job.account.notes:
            logger.info("%s", note)
        for name, reason in job.account.dropped.items():
            logger.info("dropped %s: %s", name, reason)
        write(job, out, options, progress)
        return job.account


@contextmanager
def plan(source: Path, options: ConvertOptions) -> Iterator[Job]:
    """Check the checkpoint and decide everything; the checkpoint stays open inside the block."""
    wish = recipes.Wish(
        recipes.parse_recipe(options.type),
        tuple(map(recipes.parse_override, options.tensor_types)),
        recipes.parse_type(options.draft_head) if options.draft_head else None,
    )
    with Checkpoint(source) as checkpoint:
        choices = deepseek.Choices(options.mtp, options.draft_head is not None)
        adapted = _architecture(checkpoint)(checkpoint, choices)
        choice = recipes.choose(adapted, wish)
        tensors = place(adapted.tensors, choice.types)
        for placed in tensors:
            if recipes.needs_imatrix(placed.tensor, placed.type, wish.recipe):
                raise ConversionError(
                    f"{placed.tensor.name} as {placed.type.name.lower()} "
                    "needs an importance matrix; give one with --imatrix"
                )
        kv = _metadata(checkpoint, adapted, options, wish)
        account = _account(checkpoint, adapted, tensors, choice.notes)
        yield Job(checkpoint, header(kv, tensors), tuple(tensors), account)


def write(
    job: Job,
    out: Path,
    options: ConvertOptions,
    progress: Callable[[Progress], None] | None = None,
) -> None:
    """Write a planned conversion."""
    partial = out.with_name(f"{out.name}.partial")
    encoder = Encoder(RowReader(job.checkpoint), Ggml(), options.n_threads or os.cpu_count() or 1)
    try:
        with partial.open("wb") as file:
            file.write(job.header)
            done = len(job.header)
            todo = (task for placed in job.tensors for task in tasks(placed, None))
            for task, data in encoder.stream(todo):
                file.write(data.data)
                done += len(data)
                if task.is_last:
                    file.write(bytes(pad(done) - done))
                    done = pad(done)
                if progress:
                    progress(Progress(task.placed.tensor.name, done, job.n_bytes))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(out)
    except OSError as error:
        raise ConversionError(f"cannot write {error.filename or out}: {error.strerror}") from None
    finally:
        partial.unlink(missing_ok=True)


def _architecture(
    checkpoint: Checkpoint,
) -> Callable[[Checkpoint, deepseek.Choices], Adapted]:
    names = checkpoint.config.get("architectures") or []
    if names and names[0] in deepseek.ARCHITECTURES:
        return deepseek.adapt
    raise ConversionError(
        f"config.json: the architecture {names[0] if names else None!r} is unknown; "
        f"known are {', '.join(deepseek.ARCHITECTURES)}"
    )


def _metadata(
    checkpoint: Checkpoint, adapted: Adapted, options: ConvertOptions, wish: recipes.Wish
) -> dict[str, Value]:
    kv: dict[str, Value] = {
        "general.architecture": adapted.architecture,
        "general.type": "model",
        "general.name": options.name or checkpoint.folder.resolve().name,
        "general.file_type": int(wish.recipe.file_type),
        "general.quantization_version": _QUANTIZATION_VERSION,
        "gguf_mtp.converter_version": CONVERTER_VERSION,
    }
    generation = checkpoint.json("generation_config.json") or {}
    for key, field_ in (("temp", "temperature"), ("top_p", "top_p")):
        value = generation.get(field_)
        if isinstance(value, int | float) and not isinstance(value, bool):
            kv[f"general.sampling.{key}"] = float(value)
    kv |= adapted.kv
    n_vocab = adapted.kv[f"{adapted.architecture}.vocab_size"]
    assert isinstance(n_vocab, int)
    return kv | vocabulary(checkpoint, n_vocab)


def _account(
    checkpoint: Checkpoint, adapted: Adapted, tensors: list[TypedTensor], notes: list[str]
) -> Account:
    prefix = f"blk.{adapted.mtp_block}."
    return Account(
        n_read=len(checkpoint.tensors),
        n_written=adapted.n_written,
        n_merged=adapted.n_merged,
        dropped=adapted.dropped,
        n_tensors=len(tensors),
        n_bytes=sum(t.n_bytes for t in tensors),
        bytes_by_type=recipes.bytes_by_type(
            (t.type for t in tensors), (t.n_bytes for t in tensors)
        ),
        mtp_block=adapted.mtp_block,
        mtp_bytes=sum(t.n_bytes for t in tensors if t.tensor.name.startswith(prefix)),
        notes=(*adapted.notes, *notes),
    )
