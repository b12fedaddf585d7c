"""Text in, text out: an engine with its vocabulary.

The thin layer between tokens and people. It renders no pixels and speaks no HTTP; whoever does
consumes its `Piece`s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple, Protocol

from gguf_mtp import chat
from gguf_mtp.engine import Engine
from gguf_mtp.params import SamplingParams
from gguf_mtp.text import Detokenizer
from gguf_mtp.types import Chunk, ModelFacts


class Vocabulary(Protocol):
    """What a session needs of a vocabulary (`llama.Vocab`)."""

    bos: str
    eos: str
    chat_template: str | None

    def tokenize(self, text: str, add_special: bool, parse_special: bool = True) -> list[int]: ...
    def piece(self, token: int) -> bytes: ...


class Lying(Protocol):
    """Where a loaded model lies (`placement.Lying`), in lines for people."""

    def lines(self) -> list[str]: ...


class Piece(NamedTuple):
    """Text that became printable, and the chunk of tokens it came with."""

    text: str
    chunk: Chunk


class Session:
    """A loaded model, ready to answer. A context manager; closing it frees the model.

    `side` are the facts of the file that drafts when it is not the model's own; `lying` says where
    everything lies.
    """

    def __init__(
        self,
        engine: Engine,
        vocab: Vocabulary,
        facts: ModelFacts,
        resources: ExitStack,
        side: ModelFacts | None = None,
        lying: Lying | None = None,
    ) -> None:
        self.engine, self.vocab, self.facts, self.side = engine, vocab, facts, side
        self.lying = lying
        self._resources = resources

    def chat_tokens(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The tokens of a conversation, ready for the assistant's turn.

        Raises `RequestError` when the model has no chat template or the template refuses.
        """
        prompt = chat.render(self.vocab.chat_template, messages, self.vocab.bos, self.vocab.eos)
        return self.vocab.tokenize(prompt.text, add_special=not prompt.has_bos)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        params: SamplingParams | None = None,
        max_tokens: int = 1 << 30,
    ) -> Iterator[Piece]:
        """The assistant's answer to `messages`, piece by piece. Closing the iterator stops it."""
        return self.answer(self.chat_tokens(messages), params, max_tokens)

    def complete(
        self, prompt: str, params: SamplingParams | None = None, max_tokens: int = 1 << 30
    ) -> Iterator[Piece]:
        """The continuation of a raw prompt, piece by piece."""
        return self.answer(self.vocab.tokenize(prompt, add_special=True), params, max_tokens)

    def answer(
        self, tokens: Sequence[int], params: SamplingParams | None, max_tokens: int
    ) -> Iterator[Piece]:
        """Pieces for a prompt of tokens; the last one's chunk has `finish_reason` and `stats`."""
        detokenizer = Detokenizer(self.vocab.piece)
        for chunk in self.engine.generate([tokens], params or self.sampling_defaults(), max_tokens):
            text = detokenizer.add(chunk.tokens)
            if chunk.finish_reason:
                text += detokenizer.finish()
            yield Piece(text, chunk)

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
