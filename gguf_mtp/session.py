"""Text in, text out: an engine with its vocabulary.

The thin layer between tokens and people. It renders no pixels and speaks no HTTP; whoever does
consumes its `Piece`s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple, Protocol

from gguf_mtp.answers.text import Detokenizer
from gguf_mtp.chat import reasoning
from gguf_mtp.chat import template as chat
from gguf_mtp.chat.template import Prompt
from gguf_mtp.engine.engine import Engine
from gguf_mtp.errors import RequestError
from gguf_mtp.grammar.matching import Grammar, Grammars, Thinking
from gguf_mtp.grammar.reasoning import GrammarState
from gguf_mtp.params import AnswerOptions, SamplingParams
from gguf_mtp.types import Chunk, ModelFacts


class Vocabulary(Protocol):
    """What a session needs of a vocabulary (`llama.Vocab`)."""

    bos: str
    eos: str
    chat_template: str | None

    def tokenize(self, text: str, add_special: bool, parse_special: bool = True) -> list[int]: ...
    def piece(self, token: int) -> bytes: ...


class PlacementReport(Protocol):
    """Where a loaded model lies (`placement.Lying`), in lines for people."""

    def lines(self) -> list[str]: ...


class Wishes(NamedTuple):
    """What answers may be asked for beyond sampling: a grammar that their text obeys, behind the
    reasoning if there is any, and how many likely tokens to report with each (None: nothing)."""

    grammar: Grammar | None = None
    n_logprobs: int | None = None


NO_WISHES = Wishes()


class Piece(NamedTuple):
    """Text that became printable, and the chunk of tokens it came with."""

    text: str
    chunk: Chunk


class Session:
    """A loaded model, ready to answer. A context manager; closing it frees the model.

    `side` are the facts of the file that drafts when it is not the model's own; `placement` says
    where everything lies.
    """

    def __init__(
        self,
        engine: Engine,
        vocab: Vocabulary,
        facts: ModelFacts,
        resources: ExitStack,
        side: ModelFacts | None = None,
        placement: PlacementReport | None = None,
    ) -> None:
        self.engine, self.vocab, self.facts, self.side = engine, vocab, facts, side
        self.placement = placement
        self.grammars = Grammars(vocab, facts.n_vocab, engine.limits.end_tokens)
        self._resources = resources

    def chat_tokens(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The tokens of a conversation, ready for the assistant's turn.

        Raises `RequestError` when the model has no chat template or the template refuses.
        """
        return self._tokens(self._prompt(messages))

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        params: SamplingParams | None = None,
        max_tokens: int = 1 << 30,
        wishes: Wishes = NO_WISHES,
    ) -> Iterator[Piece]:
        """The assistant's answer to `messages`, piece by piece. Closing the iterator stops it.

        Raises `RequestError`, at the end, for an answer that could not follow its grammar.
        """
        prompt = self._prompt(messages)
        following = None
        if wishes.grammar:
            can_think = reasoning.CLOSE in (self.vocab.chat_template or "")
            following = follow(wishes.grammar, self.vocab, prompt.text if can_think else "")
        asked = _Asked(self._tokens(prompt), max_tokens, wishes.n_logprobs, following)
        return self._answer(asked, params or self.sampling_defaults())

    def complete(
        self,
        prompt: str,
        params: SamplingParams | None = None,
        max_tokens: int = 1 << 30,
        wishes: Wishes = NO_WISHES,
    ) -> Iterator[Piece]:
        """The continuation of a raw prompt, piece by piece. Raises as `chat` does."""
        following = wishes.grammar.follow() if wishes.grammar else None
        tokens = self.vocab.tokenize(prompt, add_special=True)
        asked = _Asked(tokens, max_tokens, wishes.n_logprobs, following)
        return self._answer(asked, params or self.sampling_defaults())

    def _prompt(self, messages: Sequence[Mapping[str, str]]) -> Prompt:
        return chat.render(self.vocab.chat_template, messages, self.vocab.bos, self.vocab.eos)

    def _tokens(self, prompt: Prompt) -> list[int]:
        return self.vocab.tokenize(prompt.text, add_special=not prompt.has_bos)

    def _answer(self, asked: _Asked, params: SamplingParams) -> Iterator[Piece]:
        """Pieces for a prompt of tokens; the last one's chunk has `finish_reason` and `stats`."""
        params.check_vocabulary(self.facts.n_vocab)
        detokenizer = Detokenizer(self.vocab.piece)
        options = AnswerOptions(constraint=asked.following, n_logprobs=asked.n_logprobs)
        for chunk in self.engine.generate([asked.tokens], params, asked.max_tokens, options):
            text = detokenizer.add(chunk.tokens)
            if chunk.finish_reason:
                text += detokenizer.finish()
            yield Piece(text, chunk)
        if asked.following and asked.following.failure:
            raise RequestError(f"the grammar could not be followed: {asked.following.failure}")

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
        self._resources.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Asked(NamedTuple):
    """One answer to make."""

    tokens: Sequence[int]
    max_tokens: int
    n_logprobs: int | None
    following: GrammarState | None


def follow(
    grammar: Grammar, vocab: Vocabulary, prompt: str, openings: frozenset[int] = frozenset()
) -> GrammarState:
    """Obedience to `grammar` behind the reasoning of an answer to `prompt`, of a model that may
    reason; with no prompt from the first token on. With `openings` not before one of these tokens
    has come."""
    thinking = _thinking(vocab, prompt)
    if openings:
        return grammar.follow_once(openings, thinking)
    return grammar.follow() if thinking is None else grammar.follow_after(thinking)


def _thinking(vocab: Vocabulary, prompt: str) -> Thinking | None:
    close, piece = reasoning.CLOSE.encode(), piece_of(vocab, [reasoning.CLOSE])
    if reasoning.is_open(prompt):
        return Thinking(close, piece)
    opening = vocab.tokenize(reasoning.OPEN, add_special=False)
    if prompt and reasoning.may_open(prompt) and len(opening) == 1:
        return Thinking(close, piece, opening[0])
    return None


def piece_of(vocab: Vocabulary, markers: Sequence[str]) -> Callable[[int], bytes]:
    """The bytes of a token; `markers` have theirs even where they are control tokens."""
    known: dict[int, bytes] = {}
    for marker in markers:
        ids = vocab.tokenize(marker, add_special=False)
        if len(ids) == 1:
            known[ids[0]] = marker.encode()
    return lambda token: known.get(token) or vocab.piece(token)
