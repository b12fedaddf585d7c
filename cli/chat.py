"""`gguf-mtp chat`: a conversation in the terminal.

`Conversation` is the conversation; `Terminal` and `Pipe` are how it looks: a person's terminal with
an editable prompt, or lines in and answers out with nothing else on standard output.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from .answer_options import AnswerArgs, SessionWithOptions
from .options import ModelArgs, SamplingArgs
from .placement_options import PlacementArgs
from .spread import spread

if TYPE_CHECKING:
    from ..depth.protocol import Depth
    from ..params import SamplingParams
    from ..session import Piece
    from ..stats import Stats

HELP = (
    "/clear  clear the conversation    /think  show or hide reasoning    "
    "/stats  speed and acceptance    /exit  leave"
)


class Screen(Protocol):
    """Where a conversation happens. `ask` returns None at the end of input."""

    def ask(self) -> str | None: ...
    def write(self, text: str) -> None: ...
    def think(self, text: str) -> None: ...
    def note(self, text: str) -> None: ...


class Talker(Protocol):
    """Whom a conversation is with: a `session.Session`, or a `server_client.RemoteSession`."""

    @property
    def engine(self) -> EngineAccount: ...
    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        params: SamplingParams | None,
        max_tokens: int,
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
    answer_args: AnswerArgs,
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
    """Chat with a model. Ctrl+C stops an answer, Ctrl+D or /exit ends the chat.

    With piped input every line is a question, and only the answers are printed.
    """
    screen = _screen()
    if server is not None:
        from .server_client import RemoteSession

        if model_args != ModelArgs(model_args.model) or placement_args != PlacementArgs():
            raise typer.BadParameter(
                "with --server, set context, threads, drafting and placement on the server"
            )
        name = str(model_args.model) if model_args.model else None
        fields = sampling_args.fields() | answer_args.fields()
        remote = RemoteSession(server, name, api_key, fields)
        screen.note(f"{remote.model} at {remote.url}")
        screen.note(HELP)
        Conversation(
            remote, screen, None, sampling_args.n_max, View(not answer_args.hide_reasoning)
        ).run()
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
        talker = SessionWithOptions(session, answer_args.options(session))
        view = View(not answer_args.hide_reasoning, placement(session))
        Conversation(talker, screen, params, sampling_args.n_max, view).run()


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

    def think(self, text: str) -> None:
        """Scripts see the answers only."""

    def note(self, text: str) -> None:
        """Scripts see the answers only."""


@dataclass(slots=True)
class View:
    """What a conversation shows beside answers: the model's reasoning, and in /stats where the
    model is placed."""

    shows_reasoning: bool = True
    placement: str = ""


class Conversation:
    """Questions and answers until the end of input or /exit. Sampling goes by `params`, and an
    answer has at most `max_tokens`."""

    def __init__(
        self,
        talker: Talker,
        screen: Screen,
        params: SamplingParams | None,
        max_tokens: int,
        view: View | None = None,
    ) -> None:
        self._talker, self._screen = talker, screen
        self._params, self._max_tokens = params, max_tokens
        self._view = view or View()
        self._history: list[dict[str, str]] = []

    def run(self) -> None:
        screen = self._screen
        while (line := screen.ask()) is not None:
            match line.strip():
                case "":
                    continue
                case "/exit" | "/quit" | "/bye":
                    return
                case "/clear":
                    self._history.clear()
                    screen.note("conversation cleared")
                case "/stats":
                    self._show_stats()
                case "/think":
                    shows = self._view.shows_reasoning = not self._view.shows_reasoning
                    screen.note(f"reasoning is {'shown' if shows else 'hidden'}")
                case "/help" | "/?":
                    screen.note(HELP)
                case command if command.startswith("/") and " " not in command:
                    screen.note(f"{command} is not a command. {HELP}")
                case _:
                    self._answer(line)

    def _answer(self, line: str) -> None:
        """One exchange. A refused or failed request leaves the history as it was."""
        from ..errors import BadLogits, DecodeError, RequestError
        from . import stats_lines

        screen = self._screen
        self._history.append({"role": "user", "content": line})
        text, stats, is_thinking = "", None, False
        try:
            pieces = self._talker.chat(self._history, self._params, self._max_tokens)
            with interrupts() as interrupted:
                for piece in pieces:
                    is_thinking = self._show(piece, is_thinking)
                    text += piece.text
                    stats = piece.stats
                    if interrupted():
                        pieces.close()  # type: ignore[attr-defined]
                        break
        except (BadLogits, DecodeError, RequestError) as error:
            del self._history[-1]
            screen.write("\n" if text or is_thinking else "")
            print(f"error: {error}", file=sys.stderr)
            return
        screen.write("\n")
        if interrupted():
            screen.note("stopped")
        if stats:
            screen.note(stats_lines.answer_line(stats, self._talker.engine.depth))
        self._history.append({"role": "assistant", "content": text})

    def _show(self, piece: Piece, is_thinking: bool) -> bool:
        """`is_thinking`: reasoning was shown and no text since; returns the same after `piece`."""
        if self._view.shows_reasoning and piece.reasoning:
            self._screen.think(piece.reasoning)
            is_thinking = True
        if piece.text and is_thinking:
            self._screen.think("\n\n")
            is_thinking = False
        self._screen.write(piece.text)
        return is_thinking

    def _show_stats(self) -> None:
        from . import stats_lines

        screen, engine = self._screen, self._talker.engine
        totals = engine.totals
        lines = stats_lines.lines(totals) if totals.rounds else ["nothing has been answered yet"]
        for line in [*lines, *stats_lines.decision_lines(engine.depth)]:
            screen.note(line)
        if engine.stopped_drafting:
            screen.note(f"drafting is off: {engine.stopped_drafting}")
        if self._view.placement:
            screen.note(f"placement: {self._view.placement}")


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
