"""From an answer's tokens to what clients see of it: reasoning, content and tool calls.

One `AnswerParser` for each answer. It runs where the engine runs, between two rounds, so that a
stop string ends the request before the next one. Knows no HTTP and no JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from gguf_mtp.answers.detokenizer import Detokenizer
from gguf_mtp.answers.stop_strings import StopStrings
from gguf_mtp.answers.token_sources import TokenSource, TokenSources
from gguf_mtp.chat.reasoning import ReasoningParser
from gguf_mtp.chat.tool_calls import CallArguments, CallStart, Content, Event, ToolCallParser
from gguf_mtp.errors import RequestError
from gguf_mtp.grammar.reasoning import GrammarState
from gguf_mtp.stats import Stats
from gguf_mtp.types import Chunk, TokenLogprobs

__all__ = ["AnswerEvent", "AnswerParser", "Delta", "End", "Failure", "ParseOptions"]

Finish = Literal["stop", "length", "tool_calls"]


class CallParser(Protocol):
    """Reads tool calls from a text that comes in pieces (`chat.tool_calls.ToolCallParser`)."""

    is_done: bool
    n_calls: int

    def add(self, text: str) -> list[Event]: ...
    def finish(self) -> list[Event]: ...


@dataclass(frozen=True, slots=True)
class ParseOptions:
    """How the text of an answer is read.

    `piece`: a token's bytes, those of the markers that are parsed included. `thinks`: whether it
    begins inside reasoning; None when there is none to look for. `begun` is what the prompt already
    holds of a tool call. `max_calls`: 0 where no calls are looked for, None for any number;
    `parser` makes what reads them. `with_sources`: whether the text comes token by token, with
    where each came from.
    """

    piece: Callable[[int], bytes]
    stops: Sequence[str] = ()
    thinks: bool | None = None
    begun: str = ""
    max_calls: int | None = 0
    parser: Callable[[int | None], CallParser] = ToolCallParser
    with_sources: bool = False


class Delta(NamedTuple):
    """What was added to a choice. `tokens` are those whose text has been given out with it;
    `source` says where they came from, and `logprobs` how likely each was, when somebody asked."""

    reasoning: str
    content: str
    calls: Sequence[CallStart | CallArguments]
    tokens: Sequence[int]
    source: TokenSource | None = None
    logprobs: Sequence[TokenLogprobs] = ()


class End(NamedTuple):
    """A choice is complete. `n_tokens` and `n_reasoning` count its tokens up to the stop string,
    which is `stop` where one ended it."""

    finish: Finish
    n_tokens: int
    n_reasoning: int
    stats: Stats
    stop: str | None = None


class Failure(NamedTuple):
    """A choice will not be completed."""

    error: Exception


AnswerEvent = Delta | End | Failure


class AnswerParser:
    """Gives `tell` the events of one answer; the last is an `End` or a `Failure`. `state` is the
    constraint that the choice obeys: where that gave up, the choice has failed."""

    def __init__(
        self,
        options: ParseOptions,
        tell: Callable[[AnswerEvent], None],
        state: GrammarState | None = None,
    ) -> None:
        self._tell, self._state = tell, state
        self._detokenizer = Detokenizer(options.piece)
        self._stops = StopStrings(options.stops)
        self._reasoning = None if options.thinks is None else ReasoningParser(options.thinks)
        self._calls: CallParser | None = None
        if options.max_calls != 0:
            self._calls = options.parser(options.max_calls)
            self._calls.add(options.begun)
        self._sources = TokenSources() if options.with_sources else None
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []  # of all tokens or of none
        self._n_chars = 0  # of the text, as far as it is shown
        self._n_told = 0  # tokens
        self._is_cut = False  # at a stop string
        self._has_called = False  # and wants no more
        self._is_whole = False  # nothing more is wanted, or will come

    def receive(self, chunk: Chunk) -> bool:
        """Takes a chunk of the answer; whether more is wanted."""
        for part in self._sources.split(chunk) if self._sources else (chunk,):
            if not self._is_whole:
                self._read(part)
        if chunk.finish_reason:
            self._tell(self._failure() or self._end(chunk))
        return not self._is_whole

    def fail(self, error: Exception) -> None:
        """The answer will not be completed, because of `error`."""
        self._tell(Failure(error))

    def _read(self, chunk: Chunk) -> None:
        self._tokens += chunk.tokens
        self._logprobs += chunk.logprobs or ()
        text = self._detokenizer.add(chunk.tokens)
        is_last = chunk.finish_reason is not None
        if is_last:
            text += self._detokenizer.finish()
        shown, at = self._stops.add(text)
        if is_last and at is None:
            shown += self._stops.finish()
        self._n_chars += len(shown)
        self._is_cut = at is not None
        self._is_whole = is_last or self._is_cut
        reasoning, events = self._parse(shown)
        content = "".join(event.text for event in events if isinstance(event, Content))
        calls = [event for event in events if not isinstance(event, Content)]
        if reasoning or content or calls or self._is_whole:
            n = self._n_tokens()
            tokens, logprobs = self._tokens[self._n_told : n], self._logprobs[self._n_told : n]
            self._n_told = n
            if reasoning or content or calls or tokens:
                source = self._sources.take() if self._sources else None
                self._tell(Delta(reasoning, content, calls, tokens, source, logprobs))

    def _parse(self, text: str) -> tuple[str, list[Event]]:
        """Reasoning, and events of the rest."""
        reasoning = ""
        if self._reasoning:
            reasoning, text = self._reasoning.add(text)
            if self._is_whole:
                rest = self._reasoning.finish()
                reasoning, text = reasoning + rest.reasoning, text + rest.content
        if self._calls is None:
            return reasoning, [Content(text)]
        events = self._calls.add(text)
        self._has_called = self._calls.is_done
        if self._has_called:
            self._is_whole = True
        elif self._is_whole:
            events += self._calls.finish()
        return reasoning, events

    def _n_tokens(self) -> int:
        """Tokens of the answer so far: those within the text that was shown."""
        if self._is_whole and not self._is_cut:
            return len(self._tokens)
        return self._detokenizer.n_tokens(self._n_chars)

    def _failure(self) -> Failure | None:
        reason = self._state.failure if self._state else None
        if reason is None or self._is_cut or self._has_called:
            return None
        return Failure(RequestError(f"the answer's grammar could not be followed: {reason}"))

    def _end(self, chunk: Chunk) -> End:
        finish: Finish = "stop"
        if chunk.finish_reason == "length" and not self._is_cut and not self._has_called:
            finish = "length"
        if self._calls and self._calls.n_calls and finish == "stop":
            finish = "tool_calls"
        n_tokens, n_reasoning = self._n_tokens(), 0
        if self._reasoning:
            end = self._reasoning.end
            n_reasoning = n_tokens if end is None else self._detokenizer.n_tokens(end)
        return End(finish, n_tokens, n_reasoning, chunk.stats or Stats(), self._stops.found)
