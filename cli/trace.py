"""`gguf-mtp trace`: what a server's drafting did over time, drawn from `serve --trace`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ..telemetry.trace import Recording

HEIGHT = 8
NARROWEST, WIDEST = 20, 160


def trace(
    file: Annotated[Path, typer.Argument(help="File written by `gguf-mtp serve --trace FILE`.")],
    png: Annotated[
        Path | None,
        typer.Option(
            help="Also save the drawing to this image file (needs matplotlib).", show_default=False
        ),
    ] = None,
) -> None:
    """Draw a trace: tokens/s and depth over time, acceptance by position."""
    from ..telemetry.trace import read

    recording = read(file)
    width = shutil.get_terminal_size((80, 24)).columns
    for line in drawn(recording, width):
        typer.echo(line)
    if png:
        from .figure import save

        save(recording, png)


def drawn(recording: Recording, width: int) -> Iterator[str]:
    """The lines of the drawing, for a terminal of `width` characters."""
    from ..telemetry.trace_stats import bins
    from .charts import columns

    yield from _facts(recording)
    if not recording.moments:
        yield "no rounds were traced"
        return
    pieces = bins(recording.moments, min(max(width - 16, NARROWEST), WIDEST))
    seconds = recording.moments[-1].t - recording.moments[0].t
    for title, values, unit in (
        ("tokens/s of all sequences over time", [b.tokens_per_s for b in pieces], "/s"),
        ("tokens drafted per sequence and round", [b.depth for b in pieces], ""),
    ):
        yield ""
        yield title
        yield from columns(values, HEIGHT, unit)
    yield f"over {seconds:.1f} s, {seconds / len(pieces):.2g} s per column; gap: nothing decoded"
    yield from _acceptance(recording)
    yield from _fallbacks(recording)


def _facts(recording: Recording) -> Iterator[str]:
    from ..telemetry.trace_stats import summary

    about, total = recording.about, summary(recording)
    yield f"{about.get('model', 'unknown model')}, started {about.get('started', 'unknown')}"
    yield (
        f"{total.n_requests} answers, {total.n_tokens} tokens in {total.n_rounds} rounds; "
        f"{total.n_prefill} prompt tokens read"
    )
    if total.busy_s:
        parts = (("target", total.target_s), ("draft", total.draft_s), ("other", total.other_s))
        shares = ", ".join(f"{name} {100 * s / total.busy_s:.0f} %" for name, s in parts)
        yield f"{total.busy_s:.2f} s in rounds: {shares}"
    if total.n_drafted:
        by = ", ".join(f"{name} {n}" for name, n in total.sources.most_common() if name)
        yield (
            f"accepted {total.n_accepted} / drafted {total.n_drafted} = "
            f"{100 * total.n_accepted / total.n_drafted:.0f} % ({by})"
        )
    if total.reasons:
        by = ", ".join(f"{reason} {n}" for reason, n in total.reasons.most_common())
        yield f"reasons for the draft depth, in rounds: {by}"
    if recording.n_starts > 1:
        yield f"the engine was started {recording.n_starts} times"
    if recording.n_torn == 1:
        yield "1 incomplete line was skipped"
    elif recording.n_torn:
        yield f"{recording.n_torn} incomplete lines were skipped"


def _acceptance(recording: Recording) -> Iterator[str]:
    from ..telemetry.trace_stats import acceptance
    from .charts import bar

    found = acceptance(recording.moments)
    if not found:
        return
    yield ""
    yield "acceptance by position in the draft"
    for position, one in enumerate(found, start=1):
        yield (
            f"{position:>3} {bar(one.rate, 40):<40} "
            f"{100 * one.rate:3.0f} %  {one.n_accepted} / {one.n_judged}"
        )


def _fallbacks(recording: Recording) -> Iterator[str]:
    if recording.fallbacks:
        yield ""
    for t, why in recording.fallbacks:
        yield f"after {t:.1f} s: {why}"
