"""`gguf-mtp chat`: a conversation in the terminal.

`Conversation` is the conversation; `Terminal` and `Pipe` are how it looks: a person's terminal with
an editable prompt, or lines in and answers out with nothing else on standard output.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from .answer_options import AnswerArgs, SessionWithOptions
from .conversation import ContextPolicy, Conversation, Screen, View
from .options import ModelArgs
from .placement_options import PlacementArgs
from .sampling_options import SamplingArgs
from .spread import spread

HINT = "/help lists the commands; Ctrl+D leaves"


TOO_SMALL = (
    "the embedded model is too small for drafts to make it faster; `gguf-mtp demo` shows one where "
    "they do"
)


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
    system: Annotated[
        str,
        typer.Option("-sys", "--system", metavar="TEXT", help="System prompt.", show_default=False),
    ] = "",
    context_full: Annotated[
        ContextPolicy,
        typer.Option(
            help="When the conversation outgrows the context: forget its oldest part, or stop."
        ),
    ] = ContextPolicy.trim,
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
        screen.note(HINT)
        view = View(not answer_args.hide_reasoning, "", system, context_full)
        Conversation(remote, screen, None, sampling_args.n_max, view).run()
        return
    from .open_session import describe, open_session, placement
    from .rpc_child import run_in_child

    if workers := placement_args.distant():
        raise typer.Exit(run_in_child(workers))
    with open_session(model_args, placement_args) as session:
        screen.note(describe(session))
        screen.note(placement(session))
        if model_args.model is None:
            screen.note(TOO_SMALL)
        screen.note(HINT)
        params = sampling_args.over(session.sampling_defaults(), session.facts.n_vocab)
        talker = SessionWithOptions(session, answer_args.options(session))
        where = placement(session)
        view = View(not answer_args.hide_reasoning, where, system, context_full)
        Conversation(talker, screen, params, sampling_args.n_max, view).run()


def _screen() -> Screen:
    if sys.stdin.isatty() and sys.stdout.isatty():
        from .terminal import Terminal

        return Terminal()
    return Pipe()


class Pipe:
    """Lines in, answers out; everything else goes nowhere, so that scripts see the answers only."""

    def ask(self, _gauge: str) -> str | None:
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None

    def write(self, text: str) -> None:
        print(text, end="", flush=True)

    def think(self, text: str) -> None:
        """Scripts see the answers only."""

    def say(self, text: str) -> None:
        """What was asked for is told beside the answers."""
        print(text, file=sys.stderr)

    def note(self, text: str) -> None:
        """Scripts see the answers only."""
