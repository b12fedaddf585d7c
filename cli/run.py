"""`gguf-mtp run`: one prompt, one answer."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .answer_options import AnswerArgs
from .options import ModelArgs
from .placement_options import PlacementArgs
from .sampling_options import SamplingArgs
from .spread import spread
from .text_files import read_text

if TYPE_CHECKING:
    from ..session import Piece


@spread
def run(
    model_args: ModelArgs,
    placement_args: PlacementArgs,
    sampling_args: SamplingArgs,
    answer_args: AnswerArgs,
    prompt: Annotated[
        str | None,
        typer.Option("-p", "--prompt", help="The prompt. Text on standard input comes before it."),
    ] = None,
    file: Annotated[
        list[Path] | None,
        typer.Option(
            "-f",
            "--file",
            metavar="FILE",
            help="File whose text comes before the prompt; repeatable.",
        ),
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
    text = _prompt(prompt, file or [])
    if not text.strip() and not raw:
        raise typer.BadParameter("the prompt is empty; give one with -p or on standard input")
    with open_session(model_args, placement_args) as session:
        if sys.stderr.isatty() and accelerators():  # else there is only one place
            print(placement(session), file=sys.stderr)
        params = sampling_args.over(session.sampling_defaults(), session.facts.n_vocab)
        options = answer_args.options(session, logprobs)
        if raw:
            pieces = session.complete(text, params, sampling_args.n_max, options=options)
        else:
            messages = [{"role": "user", "content": text}]
            pieces = session.chat(messages, params, sampling_args.n_max, options=options)
        if json:
            print(json_module.dumps(_document(pieces, logprobs is not None), ensure_ascii=False))
        else:
            shows = sys.stderr.isatty() and not answer_args.hide_reasoning
            _print(pieces, shows, sampling_args.n_max)


def _print(pieces: Iterable[Piece], shows_reasoning: bool, n_max: int) -> None:
    """The answer on standard output; the reasoning before it, dimmed, on standard error, and there
    too that the answer was cut."""
    from .dimmed import write_dimmed

    is_thinking, last = False, None
    for piece in pieces:
        last = piece
        if piece.reasoning and shows_reasoning:
            is_thinking = True
            write_dimmed(piece.reasoning, sys.stderr)
        if piece.text and is_thinking:
            is_thinking = False
            write_dimmed("\n\n", sys.stderr)
        print(piece.text, end="", flush=True)
    print()
    if last and last.finish_reason == "length" and last.stats:
        n = last.stats.decode_tokens
        why = f"after {n} tokens (-n)" if n >= n_max else "because the context is full (-c)"
        print(f"note: the answer was cut off {why}", file=sys.stderr)


def _document(pieces: Iterable[Piece], has_logprobs: bool) -> dict[str, Any]:
    """The whole answer with its counts; log-probabilities where they were asked for."""
    from . import stats_lines

    whole = list(pieces)
    last = whole[-1]
    assert last.stats is not None
    result: dict[str, Any] = {
        "text": "".join(piece.text for piece in whole),
        "tokens": [token for piece in whole for token in piece.tokens],
        "finish_reason": last.finish_reason,
        "timings": stats_lines.timings(last.stats),
        "draft": stats_lines.drafting(last.stats),
    }
    if reasoning := "".join(piece.reasoning for piece in whole):
        result["reasoning"] = reasoning
    if has_logprobs:
        result["logprobs"] = [e._asdict() for piece in whole for e in piece.logprobs]
    return result


def _prompt(prompt: str | None, files: Sequence[Path]) -> str:
    """Standard input, files and the prompt, in this order, with an empty line between."""
    parts = [] if sys.stdin.isatty() else [sys.stdin.read()]
    parts += map(read_text, files)
    if prompt is None and not files and not parts:
        raise typer.BadParameter("give a prompt with -p, or on standard input")
    parts += [prompt] if prompt is not None else []
    given = [part for part in parts if part.strip()]
    if len(given) == 1:
        return given[0]  # as it is: a raw prompt may end in white space
    return "\n\n".join(part.strip("\n") for part in given)
