"""`gguf-mtp convert`: a checkpoint's folder to a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def convert(
    source: Annotated[Path, typer.Argument(help="Folder of a safetensors checkpoint.")],
    out: Annotated[Path, typer.Option("-o", "--output", help="GGUF file to write.")],
    type_: Annotated[
        str, typer.Option("--type", help="f32, f16, bf16, q8_0, q4_k_m, ...")
    ] = "q8_0",
    threads: Annotated[int, typer.Option("-t", "--threads", min=0, help="0: every core.")] = 0,
) -> None:
    """Convert a DeepSeek-V3-class checkpoint, MTP block included, to GGUF in one pass."""
    from ..converters.convert import ConvertOptions
    from ..converters.convert import convert as run

    account = run(source, out, ConvertOptions(type=type_, n_threads=threads))
    typer.echo(
        f"{out}: {account.n_tensors} tensors, {account.n_bytes} bytes; {account.n_read} source "
        f"tensors = {account.n_written} written + {account.n_merged} merged "
        f"+ {len(account.dropped)} dropped"
    )
