"""Options that say what an answer must look like, and a session whose answers do."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from .text_files import read_text

if TYPE_CHECKING:
    from ..answers.prepare import AnswerOptions
    from ..engine.engine import Engine
    from ..params import SamplingParams
    from ..session import Piece, Session

SCHEMA = "--json-schema"


@dataclass(frozen=True)
class AnswerArgs:
    """What an answer must look like; at most one of them."""

    PANEL: ClassVar[str] = "Answer format"

    grammar: Annotated[
        str | None,
        typer.Option(
            "--grammar",
            metavar="TEXT",
            help="Grammar for the answer: GBNF, or Lark with the first line %llguidance {}.",
            show_default=False,
        ),
    ] = None
    grammar_file: Annotated[
        Path | None,
        typer.Option(
            "--grammar-file", metavar="FILE", help="File with the grammar.", show_default=False
        ),
    ] = None
    json_schema: Annotated[
        str | None,
        typer.Option(
            "-j",
            SCHEMA,
            metavar="JSON",
            help="JSON schema for the answer; {} allows any JSON.",
            show_default=False,
        ),
    ] = None
    hide_reasoning: Annotated[
        bool,
        typer.Option(
            "--hide-reasoning", help="Do not show what the model thinks before it answers."
        ),
    ] = False

    def options(self, session: Session, n_logprobs: int | None = None) -> AnswerOptions:
        """Raises `RequestError` for what is no grammar, and says where."""
        from ..answers.prepare import AnswerOptions
        from ..answers.structured_output import OutputFormat, format_grammar, grammar_format

        option, source = self._given()
        if option is None:
            return AnswerOptions(n_logprobs=n_logprobs)
        if option == SCHEMA:
            with _named(option):
                form = OutputFormat(option, "json", _parsed(source))
        else:
            form = grammar_format(option, source, session.grammars)
        format_grammar(session.grammars, form)  # what is wrong with it is said before any answer
        return AnswerOptions(format=form, n_logprobs=n_logprobs)

    def fields(self) -> dict[str, Any]:
        """The same as fields of a request to a server. Raises `RequestError`."""
        option, source = self._given()
        if option is None:
            return {}
        if option != SCHEMA:
            return {"grammar": source}
        with _named(option):
            schema = {"name": "answer", "schema": _parsed(source), "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}

    def _given(self) -> tuple[str | None, str]:
        """The option that was given, and the grammar or the schema with it."""
        from ..errors import RequestError
        from ..grammar.matching import MAX_CHARS

        given = {
            "--grammar": self.grammar,
            "--grammar-file": self.grammar_file,
            SCHEMA: self.json_schema,
        }
        names = [name for name, value in given.items() if value is not None]
        if len(names) > 1:
            raise RequestError(f"{names[0]} and {names[1]} cannot be combined; give one")
        if not names:
            return None, ""
        if self.grammar_file is None:
            return names[0], str(given[names[0]])
        return names[0], read_text(self.grammar_file, MAX_CHARS)


class SessionWithOptions:
    """A session all of whose answers have the same options."""

    def __init__(self, session: Session, options: AnswerOptions) -> None:
        self._session, self._options = session, options

    @property
    def engine(self) -> Engine:
        return self._session.engine

    @property
    def n_ctx(self) -> int:
        return self._session.engine.limits.n_ctx

    def count(self, messages: Sequence[Mapping[str, str]]) -> int:
        """The tokens of a prompt."""
        return len(self._session.chat_tokens(messages))

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        params: SamplingParams | None,
        max_tokens: int,
    ) -> Iterator[Piece]:
        """See `Session.chat`."""
        return self._session.chat(messages, params, max_tokens, options=self._options)


@contextmanager
def _named(option: str) -> Iterator[None]:
    """Puts the option's name before what was wrong with its value."""
    from ..errors import RequestError

    try:
        yield
    except RequestError as error:
        raise RequestError(f"{option}: {error}") from None


def _parsed(source: str) -> Any:
    from ..errors import RequestError

    try:
        return json.loads(source)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"it is not valid JSON: {error}") from None
