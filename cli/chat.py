"""`gguf-mtp chat`: a conversation in the terminal.

`converse` is the conversation; `Terminal` and `Pipe` are how it looks: a person's terminal with an
editable prompt, or lines in and answers out with nothing else on standard output.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from .answer_options import AnswerArgs, Shaped
from .options import ModelArgs, SamplingArgs, spread
from .placement_options import PlacementArgs

if TYPE_CHECKING:
    from ..depth.protocol import Depth
    from ..params import SamplingParams
    from ..session import Piece
    from ..stats import Stats

HELP = "/clear  forget the conversation    /stats  speed and acceptance    /exit  leave"


class Screen(Protocol):
    """Where a conversation happens. `ask` returns None at the end of input."""

    def ask(self) -> str | None: ...
    def write(self, text: str) -> None: ...
    def note(self, text: str) -> None: ...


class Talker(Protocol):
    """Whom a conversation is with: a `session.Session`, or a `remote.RemoteSession`."""

    @property
    def engine(self) -> EngineAccount: ...
    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        params: SamplingParams | None = None,
        max_tokens: int = ...,
    ) -> Iterator[Piece]: ...


class EngineAccount(Protocol):
    """What /stats shows of an engine."""

    @property
    def totals(self) -> Stats: ...
    @property
    def depth(self) -> Depth: ...
    @property
    def stopped_drafting(self) -> str | None: ...


@spread
def chat(
    model_args: ModelArgs,
    placement_args: PlacementArgs,
    sampling_args: SamplingArgs,
    shape_args: AnswerArgs,
    server: Annotated[
        str | None,
        typer.Option(
            "--server",
            metavar="URL",
            help="Chat with an OpenAI-compatible server; MODEL is then the model's name there.",
            show_default=False,
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="GGUF_MTP_API_KEY", help="The server's API key.", show_default=False),
    ] = None,
) -> None:
    """Chat with a model. Ctrl+C stops an answer, Ctrl+D or /exit ends the chat."""
    screen = _screen()
    if server is not None:
        from .server_client import RemoteSession

        if model_args != ModelArgs(model_args.model) or placement_args != PlacementArgs():
            raise typer.BadParameter(
                "with --server, set context, threads, drafting and placement on the server"
            )
        name = str(model_args.model) if model_args.model else None
        fields = sampling_args.fields() | shape_args.fields()
        remote = RemoteSession(server, name, api_key, fields)
        screen.note(f"{remote.model} at {remote.url}")
        screen.note(HELP)
        converse(remote, screen, None, sampling_args.n_max)
        return
    from .open_session import describe, open_session, placement
    from .rpc_child import run_in_child

    if workers := placement_args.distant():
        raise typer.Exit(run_in_child(workers))
    with open_session(model_args, placement_args) as session:
        screen.note(describe(session))
        screen.note(placement(session))
        screen.note(HELP)
        params = sampling_args.over(session.sampling_defaults(), session.facts.n_vocab)
        shaped = Shaped(session, shape_args.wishes(session))
        converse(shaped, screen, params, sampling_args.n_max, placement(session))


def _screen() -> Screen:
    if sys.stdin.isatty() and sys.stdout.isatty():
        from .terminal import Terminal

        return Terminal()
    return Pipe()


class Pipe:
    """Lines in, answers out; everything else goes nowhere, so that scripts see the answers only."""

    def ask(self) -> str | None:
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None

    def write(self, text: str) -> None:
        print(text, end="", flush=True)

    def note(self, text: str) -> None:
        """Nobody is watching."""


def converse(
    session: Talker,
    screen: Screen,
    params: SamplingParams | None,
    max_tokens: int,
    where: str = "",
) -> None:
    """Goes on until the end of input or /exit. `where` says where the model lies."""
    history: list[dict[str, str]] = []
    while (line := screen.ask()) is not None:
        match line.strip():
            case "":
                continue
            case "/exit" | "/quit" | "/bye":
                return
            case "/clear":
                history.clear()
                screen.note("conversation cleared")
            case "/stats":
                show_stats(session, screen)
                if where:
                    screen.note(f"placement: {where}")
            case "/help" | "/?":
                screen.note(HELP)
            case command if command.startswith("/") and " " not in command:
                screen.note(f"{command} is not a command. {HELP}")
            case _:
                answer(session, screen, history, line, params, max_tokens)


def answer(
    session: Talker,
    screen: Screen,
    history: list[dict[str, str]],
    line: str,
    params: SamplingParams | None,
    max_tokens: int,
) -> None:
    """One exchange, added to `history`. A refused or failed request leaves `history` as it was."""
    from ..errors import DecodeError, RequestError
    from . import stats_lines

    history.append({"role": "user", "content": line})
    text, stats = "", None
    try:
        pieces = session.chat(history, params, max_tokens)
        with interrupts() as interrupted:
            for piece in pieces:
                text += piece.text
                stats = piece.chunk.stats
                screen.write(piece.text)
                if interrupted():
                    pieces.close()  # type: ignore[attr-defined]
                    break
    except (DecodeError, RequestError) as error:
        del history[-1]
        screen.write("\n" if text else "")
        print(f"error: {error}", file=sys.stderr)
        return
    screen.write("\n")
    if interrupted():
        screen.note("stopped")
    if stats:
        screen.note(stats_lines.answer_line(stats, session.engine.depth))
    history.append({"role": "assistant", "content": text})


def show_stats(session: Talker, screen: Screen) -> None:
    from . import stats_lines

    totals = session.engine.totals
    for line in stats_lines.lines(totals) if totals.rounds else ["nothing has been answered yet"]:
        screen.note(line)
    for line in stats_lines.decision_lines(session.engine.depth):
        screen.note(line)
    if session.engine.stopped_drafting:
        screen.note(f"drafting is off: {session.engine.stopped_drafting}")


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Within it Ctrl+C only raises a flag, so that it never tears the engine in mid-round.

    A second Ctrl+C ends the program.
    """
    hit = False

    def note(_signal: int, _frame: object) -> None:
        nonlocal hit
        if hit:
            raise KeyboardInterrupt
        hit = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: hit
    finally:
        signal.signal(signal.SIGINT, before)
