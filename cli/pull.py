"""`gguf-mtp pull`: a GGUF from a hub, all its shards, and the drafter beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def pull(
    source: Annotated[
        str,
        typer.Argument(metavar="REPO[@REVISION][:QUANT]", help="For example owner/name:Q4_K_M."),
    ],
    out: Annotated[
        Path, typer.Option("-o", "--output", metavar="FOLDER", help="Folder for the files.")
    ] = Path(),
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print errors only.")] = False,
) -> None:
    """Download a GGUF model (all shards) and its drafter's file, and print how to run them."""
    from ..converters import hub
    from ..errors import RequestError

    name, _, quant = source.partition(":")
    repo = hub.parse(name)
    if repo is None:
        raise RequestError(f"{name!r} is not a repository; give owner/name or owner/name@revision")
    say_it_ourselves(quiet)
    paths = hub.pull(hub.Hub(), repo, quant or None, out)
    if not quiet:
        typer.echo(f"gguf-mtp run {paths[0]}")
        if len(paths) > 1:
            is_found = paths[0].parent == paths[1].parent
            where = "loaded automatically" if is_found else "load it with --draft-model"
            what = "DSpark drafter" if paths[1].name.startswith("dspark-") else "MTP block"
            typer.echo(f"{what}: {paths[1]} ({where})")


def say_it_ourselves(quiet: bool) -> None:
    """Keeps huggingface_hub from telling of each of its tries, twice; `quiet` of progress too."""
    from huggingface_hub.utils import logging
    from huggingface_hub.utils.tqdm import disable_progress_bars

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    if quiet:
        disable_progress_bars()
