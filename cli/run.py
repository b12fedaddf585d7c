"""`gguf-mtp run`: one prompt, one answer."""

from __future__ import annotations

import json as json_module
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import ModelArgs, SamplingArgs, spread
from .placing import PlacementArgs
from .shaping import ShapeArgs

if TYPE_CHECKING:
    from ..sampling.logprobs import TokenLogprobs


@spread
def run(
    model_args: ModelArgs,
    placement_args: PlacementArgs,
    sampling_args: SamplingArgs,
    shape_args: ShapeArgs,
    prompt: Annotated[
        str | None,
        typer.Option("-p", "--prompt", help="The prompt; standard input without one."),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it stands: no chat template.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=20,
            help="With --json: how likely each token was, and the N likeliest there.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Answer one prompt and exit."""
    from ..llama import accelerators
    from . import report
    from .distant import run_in_child
    from .start import open_session, placement

    if workers := placement_args.distant():
        raise typer.Exit(run_in_child(workers))

    text = prompt if prompt is not None else _standard_input()
    with open_session(model_args, placement_args) as session:
        if sys.stderr.isatty() and accelerators():  # else there is one place to lie
            print(placement(session), file=sys.stderr)
        params = sampling_args.over(session.sampling_defaults())
        wishes = shape_args.wishes(session, logprobs if json else None)
        if raw:
            pieces = session.complete(text, params, sampling_args.n_max, wishes)
        else:
            messages = [{"role": "user", "content": text}]
            pieces = session.chat(messages, params, sampling_args.n_max, wishes)
        answer, last = "", None
        tokens: list[int] = []
        likely: list[TokenLogprobs] = []
        for piece in pieces:
            answer += piece.text
            tokens += piece.chunk.tokens
            likely += piece.chunk.logprobs or ()
            last = piece.chunk
            if not json:
                print(piece.text, end="", flush=True)
    assert last is not None
    assert last.stats is not None
    if json:
        result: dict[str, Any] = {
            "text": answer,
            "tokens": tokens,
            "finish_reason": last.finish_reason,
            "timings": report.timings(last.stats),
            "draft": report.drafting(last.stats),
        }
        if logprobs is not None:
            result["logprobs"] = [entry._asdict() for entry in likely]
        print(json_module.dumps(result, ensure_ascii=False))
    else:
        print()


def _standard_input() -> str:
    if sys.stdin.isatty():
        raise typer.BadParameter("give a prompt with -p, or on standard input")
    return sys.stdin.read()
