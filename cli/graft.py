"""`gguf-mtp graft` and `gguf-mtp extract`: MTP blocks moved between GGUF files, byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .progress import conversion_bar

if TYPE_CHECKING:
    from ..converters.graft import Copied, CopyOptions

_VERIFY_BELOW = 8_000_000_000  # bytes: loading more than this is a decision of its own

Out = Annotated[
    Path,
    typer.Option(
        "-o",
        "--output",
        metavar="OUT.gguf",
        help="File to write.",
    ),
]
Split = Annotated[
    str | None,
    typer.Option(
        "--split-max-size",
        metavar="SIZE",
        help="Split into shards of at most this size: 40G, 500M, ...",
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")]
Force = Annotated[
    bool,
    typer.Option(
        "--force", help="Replace an existing file, start over, skip the free-space check."
    ),
]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print errors only.")]


def graft(
    base: Annotated[
        Path,
        typer.Argument(
            metavar="BASE.gguf", help="A model without an MTP block, or its first shard."
        ),
    ],
    mtp: Annotated[
        Path, typer.Argument(metavar="MTP.gguf", help="A file with the model's MTP block.")
    ],
    out: Out,
    split_max_size: Split = None,
    resume: Resume = False,
    force: Force = False,
    verify: Annotated[
        bool | None,
        typer.Option(help="Verify the output by loading it (default for files under 8 GB)."),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Add an MTP block to a GGUF file. Copies the bytes; quantises nothing again."""
    from ..converters.graft import graft as join
    from ..converters.resume_file import refuse_replacing

    options = _options(split_max_size, resume, force)
    refuse_replacing(out, force, resume)
    with _copying(out, quiet) as report:
        done = join(base, mtp, out, options, report)
    say = _say(quiet)
    say(_account(done))
    if verify or (verify is None and done.n_bytes < _VERIFY_BELOW):
        _verify(done.path, say)


def extract(
    model: Annotated[
        Path,
        typer.Argument(metavar="MODEL.gguf", help="A model with an MTP block, or its first shard."),
    ],
    out: Out,
    split_max_size: Split = None,
    resume: Resume = False,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Extract a model's MTP block, with embedding, norm and head, to a side file (undoes graft)."""
    from ..converters.graft import extract as take
    from ..converters.resume_file import refuse_replacing

    options = _options(split_max_size, resume, force)
    refuse_replacing(out, force, resume)
    with _copying(out, quiet) as report:
        done = take(model, out, options, report)
    _say(quiet)(_account(done))


def _options(split: str | None, resume: bool, force: bool) -> CopyOptions:
    from ..converters.graft import CopyOptions
    from ..converters.output_shards import parse_size

    return CopyOptions(parse_size(split) if split else None, resume, force)


def _say(quiet: bool) -> Callable[[str], None]:
    return lambda text: None if quiet else typer.echo(text)


@contextmanager
def _copying(out: Path, quiet: bool) -> Iterator[Callable[[str, int, int], None] | None]:
    """A bar on a terminal; an interrupted copy says how to go on."""
    from ..converters.convert import Progress

    try:
        with conversion_bar(quiet) as bar:
            yield (lambda *args: bar(Progress(*args))) if bar else None
    except KeyboardInterrupt:
        typer.echo(f"interrupted; {out}.partial is kept, continue it with --resume", err=True)
        raise


def _account(done: Copied) -> str:
    lines = [f"{done.path} has {done.n_tensors:,} tensors, {done.n_bytes:,} bytes"]
    return "\n".join([*lines, *(f"note: {remark}" for remark in done.remarks)])


def _verify(path: Path, say: Callable[[str], None]) -> None:
    from ..errors import ConversionError
    from .selftest import self_test

    result = self_test(path, "mtp", n_threads=0)
    say(f"self-test: {result.sentence}")
    if result.is_broken:
        raise ConversionError(
            f"{path} is written, but its MTP block is broken: none of its {result.drafted} drafts "
            "was accepted"
        )
