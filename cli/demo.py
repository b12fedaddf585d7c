"""`gguf-mtp demo`: what drafting gains, shown on a model that is made here."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from ..session import Session
    from ..stats import Stats

_KIND = "dense-bf16"
_WARM_UP = "What is a bridge?"
_QUESTIONS = (
    "What is a river?",
    "What does it mean to borrow?",
    "What is the population of Japan?",
    "Write the Python function sum.",
    "What is the capital of Peru?",
    "What is music?",
)
_MOST = 64  # tokens of an answer
Way = Literal["off", "auto"]
_TITLES: dict[Way, str] = {"off": "without drafts", "auto": "with drafts"}


@dataclass
class _Column:
    """One way's answer as it is written: texts with what wrote them."""

    way: Way
    pieces: list[tuple[str, str]] = field(default_factory=list)
    stats: Stats | None = None

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)


@dataclass
class _Show:
    """Both answers to one question."""

    question: str
    columns: dict[Way, _Column] = field(
        default_factory=lambda: {way: _Column(way) for way in _TITLES}
    )


def demo(
    n: Annotated[
        int, typer.Option("-q", "--questions", min=1, max=len(_QUESTIONS), help="How many.")
    ] = 4,
    threads: Annotated[
        int,
        typer.Option("-t", "--threads", min=0, help="Number of threads; 0: one per physical core."),
    ] = 0,
) -> None:
    """Show the same answers without and with drafts, and how much faster the second ones come.

    The model is the embedded one, widened to 0.4 GB so that reading its weights takes the time, as
    in a large model. It is made once and kept in the cache.
    """
    from rich.console import Console
    from rich.live import Live

    console = Console()
    shows = []
    with ExitStack() as stack:
        sessions = {way: stack.enter_context(_open(way, threads)) for way in _TITLES}
        for session in sessions.values():
            for _ in _pieces(session, _WARM_UP):
                pass
        for i, question in enumerate(_QUESTIONS[:n]):
            show = _Show(question)
            shows.append(show)
            live: Any = nullcontext()
            if console.is_terminal:
                live = Live(_table(show), console=console, auto_refresh=False)
            with live:
                for way in (*_TITLES,)[:: 1 if i % 2 == 0 else -1]:  # neither is always first
                    column = show.columns[way]
                    for piece in _pieces(sessions[way], question):
                        source = piece.source.source if piece.source else "target"
                        column.pieces.append((piece.text, source))
                        column.stats = piece.stats or column.stats
                        if console.is_terminal:
                            live.update(_table(show), refresh=True)
            if not console.is_terminal:
                _print(show)
    for line in _conclusion(shows):
        console.print(f"\n{line}", highlight=False)


def _open(way: Way, threads: int) -> Session:
    from ..bench.widen import widened_model
    from ..loading.loader import LoadOptions, load
    from .progress import conversion_bar

    with conversion_bar(quiet=False) as progress:
        path = widened_model(_KIND, progress=progress)
    return load(path, LoadOptions(n_ctx=512, n_threads=threads, draft=way))


def _pieces(session: Session, question: str) -> Iterator[Any]:
    from ..answers.prepare import AnswerOptions
    from ..params import SamplingParams

    messages = [{"role": "user", "content": question}]
    options = AnswerOptions(token_sources=True)
    yield from session.chat(messages, SamplingParams(temperature=0), _MOST, options=options)


def _table(show: _Show) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.ROUNDED, expand=True, title=show.question, title_justify="left")
    for column in show.columns.values():
        table.add_column(_heading(column), ratio=1)
    table.add_row(*map(_coloured, show.columns.values()))
    return table


def _heading(column: _Column) -> str:
    speed = f", {column.stats.tokens_per_s:.0f} tokens/s" if column.stats else ""
    return f"{_TITLES[column.way]}{speed}"


def _coloured(column: _Column) -> Text:
    """Drafted tokens in green, copied ones in yellow."""
    from rich.text import Text

    styles = {"target": "", "ngram": "yellow"}
    return Text.assemble(*((text, styles.get(source, "green")) for text, source in column.pieces))


def _print(show: _Show) -> None:
    print(f"\n{show.question}")
    for column in show.columns.values():
        print(f"  {_heading(column)}: {column.text}")


def _conclusion(shows: list[_Show]) -> list[str]:
    """Medians over the questions; what the drafts were worth; and whether the texts are equal."""
    from ..stats import Stats

    ratios, total, n_same = [], Stats(), 0
    for show in shows:
        plain, drafted = (show.columns[way] for way in _TITLES)
        n_same += plain.text == drafted.text
        if plain.stats and drafted.stats and plain.stats.tokens_per_s:
            ratios.append(drafted.stats.tokens_per_s / plain.stats.tokens_per_s)
            total += drafted.stats
    answers = "1 answer" if len(shows) == 1 else f"{len(shows)} answers"
    lines = [
        f"With drafts: {statistics.median(ratios):.2f} times as fast (median of {answers}). The "
        f"model accepted {total.accepted} of {total.drafted} drafted tokens (green; yellow where "
        f"copied), {total.tokens_per_round:.2f} tokens per round.",
        f"Equal letter by letter: {n_same} of {answers}.",
        "This is a good case: a dense model that knows these answers well. What drafting gains for "
        "a model of yours: gguf-mtp bench FILE.",
    ]
    if n_same < len(shows):
        lines[1] += (
            " Where two tokens are nearly equally likely, rounding in batches of another size can "
            "choose the other one."
        )
    return lines
