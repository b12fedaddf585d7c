"""`gguf-mtp convert`: a checkpoint's folder to a GGUF file, with a bar and an account."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..engine.config import MAX_THREADS
from .progress import conversion_bar
from .spread import spread

if TYPE_CHECKING:
    from ..converters.convert import Account, ConversionJob, ConvertOptions
    from ..converters.gguf_file import TypedTensor
    from ..converters.local_shards import Shards

_VERIFY_BELOW = 8_000_000_000  # bytes: loading more than this is a decision of its own


class Mtp(str, Enum):
    """Values of --mtp."""

    keep = "keep"
    drop = "drop"
    only = "only"


@dataclass(frozen=True)
class FormArgs:
    """What is made of the checkpoint."""

    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="OUT.gguf",
            help="File to write. Default: NAME.gguf.",
        ),
    ] = None
    type_: Annotated[
        str, typer.Option("--type", help="f32, f16, bf16, q8_0, q4_k_m, iq4_xs, iq2_m, mxfp4, ...")
    ] = "q8_0"
    tensor_type: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN=TYPE", help="Type of tensors by name; the first match wins."),
    ] = None
    recipe: Annotated[
        Path | None,
        typer.Option(
            "--recipe",
            "--tensor-type-file",
            metavar="FILE",
            help="File of PATTERN=TYPE lines, which hold behind those of --tensor-type.",
        ),
    ] = None
    imatrix: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Importance matrix written by llama-imatrix."),
    ] = None
    draft_head: Annotated[
        str | None,
        typer.Option(metavar="TYPE", help="Give the MTP block a separate head of this type."),
    ] = None
    mtp: Annotated[
        Mtp,
        typer.Option(
            help="keep: trunk and drafter; drop: the trunk only; only: the drafter as a side file."
        ),
    ] = Mtp.keep
    split_max_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Split into shards of at most this size: 40G, 500M, ..."),
    ] = None
    remote: Annotated[
        bool, typer.Option("--remote", help="Stream shards from the hub without storing them.")
    ] = False
    name: Annotated[str | None, typer.Option(help="Model name. Default: the folder's name.")] = None


@dataclass(frozen=True)
class WorkArgs:
    """How the work is done, and what is said of it."""

    threads: Annotated[
        int,
        typer.Option(
            "-t", "--threads", min=0, max=MAX_THREADS, help="Number of threads; 0: all cores."
        ),
    ] = 0
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List every tensor and its size; write nothing.")
    ] = False
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")] = False
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Replace an existing file, start over, skip the free-space check."
        ),
    ] = False
    verify: Annotated[
        bool | None,
        typer.Option(help="Verify the output by loading it (default for files under 8 GB)."),
    ] = None
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print errors only.")] = False


@spread
def convert(
    form_args: FormArgs,
    work_args: WorkArgs,
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="Folder of a safetensors checkpoint, or a hub repository: owner/name[@revision].",
        ),
    ],
) -> None:
    """Convert a DeepSeek-V3-class checkpoint, MTP block included, to GGUF in one pass."""
    from ..converters.convert import check_place, plan, write
    from ..converters.resume_file import refuse_replacing

    options = _options(source, form_args, work_args)
    say = _nothing if work_args.quiet else typer.echo
    out = form_args.out or _default(Path(source), options)
    check_place(out)
    folder, storage = _locate(source, options, form_args.remote, work_args.quiet)
    is_real = not work_args.dry_run
    with plan(folder, options, storage) as job:
        if form_args.out is None and job.account.is_dspark:
            out = out.with_name(out.name.replace("mtp-", "dspark-", 1))
        outputs = job.outputs(out)
        for path, output in outputs:  # before hours are spent
            refuse_replacing(path, work_args.force or not is_real, work_args.resume)
            if not is_real:
                for placed in output.tensors:
                    say(_line(placed))
        say(_before(job, options))
        if is_real:
            with _interruptible(out), conversion_bar(work_args.quiet) as progress:
                write(job, out, options, progress)
        for path, output in outputs:
            say(_account(path, output.account, "has" if is_real else "would have"))
    if not is_real:
        return
    if form_args.mtp is Mtp.only:
        say(f"use it with --draft-model {out}, or put it in the model's folder")
    elif work_args.verify or (work_args.verify is None and job.n_bytes < _VERIFY_BELOW):
        _verify(job, out, options, say)


def _options(source: str, form: FormArgs, work: WorkArgs) -> ConvertOptions:
    from ..converters.convert import ConvertOptions
    from ..converters.hub import parse
    from ..converters.output_shards import parse_size
    from ..converters.recipes import read_overrides

    repo = parse(source)
    from_file = read_overrides(form.recipe) if form.recipe else ()
    return ConvertOptions(
        type=form.type_,
        tensor_types=(*(form.tensor_type or ()), *from_file),
        imatrix=form.imatrix,
        draft_head=form.draft_head,
        mtp=form.mtp.value,
        n_threads=work.threads,
        name=form.name or (repo.name if repo else None),
        resume=work.resume,
        force=work.force,
        split=parse_size(form.split_max_size) if form.split_max_size else None,
    )


def _locate(
    source: str, options: ConvertOptions, remote: bool, quiet: bool
) -> tuple[Path, Shards | None]:
    """The checkpoint's folder, from the hub with the shards that are needed, or without them."""
    from ..converters.hub import Hub, fetch_checkpoint, parse
    from ..converters.remote_shards import RemoteShards
    from ..errors import RequestError
    from .pull import say_it_ourselves

    repo, hub = parse(source), Hub()
    if repo is None:
        if remote:
            raise RequestError(f"--remote reads from a hub, but {source!r} is not owner/name")
        return Path(source), None
    say_it_ourselves(quiet)
    folder = fetch_checkpoint(hub, repo, options.needs, with_shards=not remote)
    return folder, RemoteShards(hub, repo) if remote else None


def _default(source: Path, options: ConvertOptions) -> Path:
    from ..converters.checkpoint import folder_name

    name = options.name or folder_name(source)
    return Path(f"{'mtp-' if options.mtp == 'only' else ''}{name}.gguf")


def _nothing(_: str) -> None:
    pass


def _line(placed: TypedTensor) -> str:
    tensor = placed.tensor
    names = list(dict.fromkeys(piece.weight.tensor.name for piece in tensor.pieces))
    more = f" + {len(names) - 1} more" if len(names) > 1 else ""
    shape = "x".join(map(str, tensor.shape))
    return (
        f"{tensor.name:40} {placed.type.name:7} {shape:16} {placed.n_bytes:14,}  {names[0]}{more}"
    )


def _before(job: ConversionJob, options: ConvertOptions) -> str:
    from ..converters.estimate import check_ram, estimate

    checkpoint = job.checkpoint
    e = estimate(job.tensors, len(checkpoint.tensors), job.n_bytes, options.threads)
    lines = [
        f"{checkpoint.folder}: {len(checkpoint.tensors):,} tensors in {checkpoint.n_files} files, "
        f"{checkpoint.n_bytes:,} bytes",
        f"takes {e.n_bytes:,} bytes of disk, about {e.ram_bytes / 1e6:,.0f} MB of memory and "
        f"{_duration(e.seconds)} on {e.n_threads} threads, if the disks keep up",
    ]
    warning = check_ram(e.ram_bytes)
    return "\n".join([*lines, *([f"warning: {warning}"] if warning else [])])


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{max(seconds, 1):.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


@contextmanager
def _interruptible(out: Path) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"interrupted; {out}.partial is kept, continue it with --resume", err=True)
        raise


def _account(out: Path, a: Account, verb: str) -> str:
    reasons = Counter(a.dropped.values())
    first = {reason: name for name, reason in reversed(a.dropped.items())}
    lines = [
        f"{out} {verb} {a.n_tensors:,} tensors: "
        + ", ".join(f"{type_} {n:,} bytes" for type_, n in a.bytes_by_type.items()),
        f"source tensors: {a.n_read:,} read = {a.n_written:,} written + {a.n_merged:,} merged "
        f"+ {len(a.dropped):,} dropped",
        *(
            f"  dropped {first[reason]}{f' and {n - 1:,} more' if n > 1 else ''}: {reason}"
            for reason, n in reasons.items()
        ),
        _drafter(a),
        *(f"note: {note}" for note in a.notes),
    ]
    return "\n".join(lines)


def _drafter(a: Account) -> str:
    if a.is_dspark:
        return f"DSpark drafter, {a.n_bytes:,} bytes"
    if a.side == "dspark":
        return "DSpark drafter: in a file of its own"
    if a.mtp_block is not None:
        return f"MTP block: blk.{a.mtp_block}, {a.mtp_bytes:,} bytes"
    return f"MTP block: {'in a file of its own' if a.side else 'none'}"


def _verify(
    job: ConversionJob, out: Path, options: ConvertOptions, say: Callable[[str], None]
) -> None:
    from ..drafters.registry import label_of
    from ..errors import ConversionError
    from .selftest import self_test

    account, first = job.account, job.main.files(out)[0].path
    drafter = account.side or (None if account.mtp_block is None else "mtp")
    result = self_test(first, drafter, options.n_threads)
    say(f"self-test: {result.sentence}")
    if result.is_broken:
        raise ConversionError(
            f"{first} is written, but {label_of(drafter or '')} is broken: {result.drafted} "
            "drafts, none accepted"
        )
