"""`gguf-mtp run`: one prompt, one answer."""

from __future__ import annotations

import json as json_module
import sys
from typing import Annotated

import typer

from .options import ModelArgs, SamplingArgs, spread


@spread
def run(
    model_args: ModelArgs,
    sampling_args: SamplingArgs,
    prompt: Annotated[
        str | None,
        typer.Option("-p", "--prompt", help="The prompt; standard input without one."),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it stands: no chat template.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Answer one prompt and exit."""
    from . import report
    from .start import open_session

    text = prompt if prompt is not None else _standard_input()
    with open_session(model_args) as session:
        params = sampling_args.over(session.sampling_defaults())
        if raw:
            pieces = session.complete(text, params, sampling_args.n_max)
        else:
            pieces = session.chat([{"role": "user", "content": text}], params, sampling_args.n_max)
        answer, last = "", None
        tokens: list[int] = []
        for piece in pieces:
            answer += piece.text
            tokens += piece.chunk.tokens
            last = piece.chunk
            if not json:
                print(piece.text, end="", flush=True)
    assert last is not None
    assert last.stats is not None
    if json:
        result = {
            "text": answer,
            "tokens": tokens,
            "finish_reason": last.finish_reason,
            "timings": report.timings(last.stats),
            "draft": report.drafting(last.stats),
        }
        print(json_module.dumps(result, ensure_ascii=False))
    else:
        print()


def _standard_input() -> str:
    if sys.stdin.isatty():
        raise typer.BadParameter("give a prompt with -p, or on standard input")
    return sys.stdin.read()
