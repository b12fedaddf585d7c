"""The command `gguf-mtp`: registers the subcommands and shows every error once, as one sentence.

Importing this must stay cheap: whatever loads numpy, llama.cpp or Rich is imported in a command.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated

import typer

from .bench import bench
from .chat import chat
from .convert import convert
from .demo import demo
from .doctor import doctor
from .graft import extract, graft
from .help import PANELS, Command
from .inspect import inspect
from .plan import plan
from .pull import pull
from .run import run
from .serve import serve
from .trace import trace
from .worker import worker

app = typer.Typer(
    name="gguf-mtp",
    help="Run DeepSeek-class GGUF models faster with their own Multi-Token-Prediction block.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_COMMANDS = (
    chat,
    run,
    serve,
    demo,
    pull,
    convert,
    graft,
    extract,
    inspect,
    plan,
    bench,
    trace,
    doctor,
    worker,
)
for command in _COMMANDS:
    panel = next(name for name, members in PANELS.items() if command.__name__ in members)
    app.command(command.__name__, cls=Command, rich_help_panel=panel)(command)


def _tell_versions(is_asked: bool) -> None:
    if is_asked:
        typer.echo(", ".join(map(_version, ("gguf-mtp", "llama-cpp-python"))))
        raise typer.Exit


def _version(package: str) -> str:
    """Asked of what pip has written down: loading llama.cpp to learn it takes a second."""
    from importlib import metadata

    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"{package} (not installed)"


@app.callback()
def options(
    debug: Annotated[
        bool, typer.Option("--debug", help="Log everything, and show tracebacks.")
    ] = False,
    version: Annotated[  # noqa: ARG001 - its callback has ended the command
        bool,
        typer.Option(
            "-V",
            "--version",
            help="Show the versions of gguf-mtp and llama-cpp-python.",
            callback=_tell_versions,
            is_eager=True,
        ),
    ] = False,
) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Sentence())
    logging.basicConfig(
        level=logging.DEBUG if debug else logging.WARNING, handlers=[handler], force=True
    )


class _Sentence(logging.Formatter):
    """`warning: ...`, as errors are shown."""

    def format(self, record: logging.LogRecord) -> str:
        return f"{record.levelname.lower()}: {record.getMessage()}"


def main() -> None:
    """Runs the command line; exits 0, 1 after an error, 2 after wrong usage, 130 after Ctrl+C."""
    from ..errors import GgufMtpError

    _open_what_is_closed()
    try:
        app()
    except BrokenPipeError:  # the reader of our output has left: nothing to say to it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (GgufMtpError, OSError, MemoryError, ModuleNotFoundError) as error:
        if logging.getLogger().isEnabledFor(logging.DEBUG):
            raise
        print(f"error: {_sentence(error)}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _open_what_is_closed() -> None:
    """Opens to nobody the standard streams that the caller closed (`2>&-`). Python has None for
    them, and the next file to be opened would get the number, and llama.cpp's messages with it."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8"))


def _sentence(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}"
    if isinstance(error, ModuleNotFoundError) and error.name == "llama_cpp":
        return "llama-cpp-python is not installed: pip install llama-cpp-python"
    if isinstance(error, MemoryError):
        return "out of memory"
    return str(error)
