"""Text in, text out: an engine with the model's texts.

The thin layer between tokens and people. It renders no pixels and speaks no HTTP: who does consumes
its `Piece`s.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, Protocol

from gguf_mtp.answers.constraint import Vocabulary
from gguf_mtp.answers.parse import AnswerEvent, AnswerParser, Delta, End, Failure, Finish
from gguf_mtp.answers.prepare import (
    AnswerOptions,
    PreparedAnswer,
    TextModel,
    as_tokens,
    prepare_chat,
    prepare_completion,
)
from gguf_mtp.answers.structured_output import Tool
from gguf_mtp.answers.token_sources import TokenSource
from gguf_mtp.chat.tool_calls import CallArguments, CallStart
from gguf_mtp.engine.engine import Engine
from gguf_mtp.grammar.matching import Grammars
from gguf_mtp.params import AS_MANY_AS_FIT, SamplingParams
from gguf_mtp.stats import Stats
from gguf_mtp.types import ModelFacts, TokenLogprobs

__all__ = ["Piece", "PlacementReport", "Session"]

PLAIN = AnswerOptions()


class PlacementReport(Protocol):
    """Where a loaded model is (`placement.checked_plan.ActualPlacement`), in lines for people."""

    def lines(self) -> list[str]: ...


class Piece(NamedTuple):
    """What was added to an answer; everything may be empty, as while the prompt is read.

    `text` is the answer itself, `reasoning` what the model thought before it. `tool_calls` are the
    beginnings of calls and more of their arguments. `tokens` are those whose text has been given
    out with it, `logprobs` has an entry for each if the options ask for them, and `source` says
    where the newest came from. The last piece has `finish_reason` and `stats`.
    """

    text: str = ""
    reasoning: str = ""
    tool_calls: Sequence[CallStart | CallArguments] = ()
    tokens: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    source: TokenSource | None = None
    finish_reason: Finish | None = None
    stats: Stats | None = None


class Session:
    """A loaded model, ready to answer. A context manager; closing it frees the model.

    `engine`, `vocab` and `grammars` are public for those who work with tokens; `text` is what
    prepares answers. `side` are the facts of the file that drafts when it is not the model's own;
    `placement` says on which device everything is; `chat_template` and `parses_content` are
    `TextModel`'s.
    """

    def __init__(
        self,
        engine: Engine,
        vocab: Vocabulary,
        facts: ModelFacts,
        resources: ExitStack,
        side: ModelFacts | None = None,
        placement: PlacementReport | None = None,
        chat_template: str | None = None,
        parses_content: bool = False,
    ) -> None:
        self.engine, self.vocab, self.facts, self.side = engine, vocab, facts, side
        self.placement = placement
        self.grammars = Grammars(vocab, facts.n_vocab, engine.limits.end_tokens)
        self.text = TextModel(
            vocab=vocab,
            n_vocab=facts.n_vocab,
            limits=engine.limits,
            grammars=self.grammars,
            chat_template=chat_template,
            parses_content=parses_content,
        )
        self._resources = resources

    def chat_tokens(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens of a conversation, ready for the assistant's turn.

        Raises `RequestError` when the model has no chat template or the template refuses.
        """
        return list(prepare_chat(self.text, messages, PLAIN).prompts[0])

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        max_tokens: int = AS_MANY_AS_FIT,
        *,
        stop: Sequence[str] = (),
        tools: Sequence[Tool] = (),
        options: AnswerOptions = PLAIN,
    ) -> Iterator[Piece]:
        """The assistant's answer to `messages`, piece by piece. Closing the iterator stops it.

        `stop` and `tools` are those of `options`, for short. Several answers may be read in turn.
        Raises `RequestError` for messages and options that make no sense and, at the end, for an
        answer that could not follow its grammar; `BadLogits` for a model that computes no numbers.
        """
        options = _with(options, stop, tools)
        return self._answer(prepare_chat(self.text, messages, options), params, max_tokens)

    def complete(
        self,
        prompt: str,
        params: SamplingParams | None = None,
        max_tokens: int = AS_MANY_AS_FIT,
        *,
        stop: Sequence[str] = (),
        options: AnswerOptions = PLAIN,
    ) -> Iterator[Piece]:
        """The continuation of a raw prompt, piece by piece. Raises as `chat` does."""
        tokens = as_tokens(self.text, prompt)
        prepared = prepare_completion(self.text, [tokens], _with(options, stop, ()))
        return self._answer(prepared, params, max_tokens)

    def _answer(
        self, prepared: PreparedAnswer, params: SamplingParams | None, max_tokens: int
    ) -> Iterator[Piece]:
        params = params or self.sampling_defaults()
        params.check_vocabulary(self.facts.n_vocab)
        state = prepared.constrain()
        request = dataclasses.replace(prepared.options, constraint=state)
        events: deque[AnswerEvent] = deque()
        parser = AnswerParser(prepared.parsing, events.append, state)
        stream = self.engine.open(prepared.prompts, params, max_tokens, request)
        try:
            for chunk in stream:
                wants_more = parser.receive(chunk)
                yield from _pieces(events)
                if not wants_more:
                    break
            for chunk in stream.cancel():  # ended early, as at a stop string
                parser.receive(chunk)
                yield from _pieces(events)
        finally:
            stream.close()

    def sampling_defaults(self) -> SamplingParams:
        """llama.cpp's defaults, overridden by what the file's author put into its header."""
        own = {
            name: self.facts.kv[key]
            for name, key in (
                ("temperature", "general.sampling.temp"),
                ("top_k", "general.sampling.top_k"),
                ("top_p", "general.sampling.top_p"),
                ("min_p", "general.sampling.min_p"),
            )
            if key in self.facts.kv
        }
        return SamplingParams(**own)

    def close(self) -> None:
        """Ends all answers and frees the model."""
        self.engine.close()
        self._resources.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _with(options: AnswerOptions, stop: Sequence[str], tools: Sequence[Tool]) -> AnswerOptions:
    given: dict[str, Any] = {}
    if stop:
        given["stop"] = [stop] if isinstance(stop, str) else stop
    if tools:
        given["tools"] = tools
    return dataclasses.replace(options, **given) if given else options


def _pieces(events: deque[AnswerEvent]) -> Iterator[Piece]:
    """What the parser made of a chunk; an empty piece where that is nothing, so that the reader
    can stop the answer meanwhile."""
    if not events:
        yield Piece()
    while events:
        event = events.popleft()
        if isinstance(event, Failure):
            raise event.error
        if isinstance(event, End):
            yield Piece(finish_reason=event.finish, stats=event.stats)
        else:
            yield _piece(event)


def _piece(delta: Delta) -> Piece:
    return Piece(
        delta.content, delta.reasoning, delta.calls, delta.tokens, delta.logprobs, delta.source
    )
