"""`gguf-mtp run`: one prompt, one answer."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .answer_options import AnswerArgs
from .options import ModelArgs, SamplingArgs, spread
from .placement_options import PlacementArgs

if TYPE_CHECKING:
    from ..session import Piece


@spread
def run(
    model_args: ModelArgs,
    placement_args: PlacementArgs,
    sampling_args: SamplingArgs,
    shape_args: AnswerArgs,
    prompt: Annotated[
        str | None,
        typer.Option("-p", "--prompt", help="The prompt. Default: standard input."),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without chat template.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=20,
            help="With --json: log-probabilities of each token and of the N most likely tokens.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Answer one prompt and exit."""
    from ..llama import accelerators
    from .open_session import open_session, placement
    from .rpc_child import run_in_child

    if workers := placement_args.distant():
        raise typer.Exit(run_in_child(workers))

    if logprobs is not None and not json:
        raise typer.BadParameter("--logprobs needs --json")
    text = prompt if prompt is not None else _standard_input()
    with open_session(model_args, placement_args) as session:
        if sys.stderr.isatty() and accelerators():  # else there is one place to lie
            print(placement(session), file=sys.stderr)
        params = sampling_args.over(session.sampling_defaults(), session.facts.n_vocab)
        wishes = shape_args.wishes(session, logprobs)
        if raw:
            pieces = session.complete(text, params, sampling_args.n_max, wishes)
        else:
            messages = [{"role": "user", "content": text}]
            pieces = session.chat(messages, params, sampling_args.n_max, wishes)
        if json:
            print(json_module.dumps(_document(pieces), ensure_ascii=False))
        else:
            for piece in pieces:
                print(piece.text, end="", flush=True)
            print()


def _document(pieces: Iterable[Piece]) -> dict[str, Any]:
    """The whole answer with its counts; log-probabilities where they were asked for."""
    from . import stats_lines

    whole = list(pieces)
    last = whole[-1].chunk
    assert last.stats is not None
    result: dict[str, Any] = {
        "text": "".join(piece.text for piece in whole),
        "tokens": [token for piece in whole for token in piece.chunk.tokens],
        "finish_reason": last.finish_reason,
        "timings": stats_lines.timings(last.stats),
        "draft": stats_lines.drafting(last.stats),
    }
    chunks = [piece.chunk for piece in whole]
    if any(chunk.logprobs is not None for chunk in chunks):
        result["logprobs"] = [e._asdict() for chunk in chunks for e in chunk.logprobs or ()]
    return result


def _standard_input() -> str:
    if sys.stdin.isatty():
        raise typer.BadParameter("give a prompt with -p, or on standard input")
    return sys.stdin.read()
