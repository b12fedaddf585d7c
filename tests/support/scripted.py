"""An engine that answers from a script, and a vocabulary of bytes and markers to write it in.

With them the server is tested without llama.cpp: what reaches a client is then known to the token.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gguf_mtp.engine.config import EngineLimits
from gguf_mtp.errors import GgufMtpError
from gguf_mtp.params import PLAIN, RequestOptions, SamplingParams
from gguf_mtp.stats import Stats
from gguf_mtp.types import Chunk, FinishReason, TokenLogprobs
from tests.support.chat_formats import BOS, EOS
from tests.support.waiting import PATIENCE_S

CONTROL = [
    BOS,
    EOS,
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁outputs▁begin｜>",
    "<｜tool▁outputs▁end｜>",
    "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
]
VISIBLE = ["<think>", "</think>"]
MARKERS = CONTROL + VISIBLE
N_VOCAB = 256 + len(MARKERS)
_SPLIT = re.compile("|".join(map(re.escape, MARKERS)))


class ByteVocab:
    """Token i < 256 is byte i; then come the markers, of which control tokens have no text."""

    def __init__(self, chat_template: str | None = None, adds_bos: bool = True) -> None:
        self.bos, self.eos, self.chat_template = BOS, EOS, chat_template
        self._adds_bos = adds_bos

    def tokenize(self, text: str, add_special: bool, parse_special: bool = True) -> list[int]:
        if not parse_special:
            return [*self._head(add_special), *text.encode(errors="replace")]
        return self.prompt_tokens(text, add_special, 0, guard="")

    def prompt_tokens(self, text: str, add_special: bool, most: int, guard: str) -> list[int]:
        assert most >= 0  # the engine says what is too long
        ids, pos = self._head(add_special), 0
        for match in _SPLIT.finditer(text):
            ids += self._bytes(text[pos : match.start()], guard)
            ids.append(256 + MARKERS.index(match[0]))
            pos = match.end()
        return [*ids, *self._bytes(text[pos:], guard)]

    def guarded(self, text: str, guard: str, but: Sequence[str] = ()) -> str:
        for marker in set(CONTROL) - set(but):
            text = text.replace(marker, marker[0] + guard + marker[1:])
        return text

    def _head(self, add_special: bool) -> list[int]:
        return [256] if add_special and self._adds_bos else []

    @staticmethod
    def _bytes(text: str, guard: str) -> bytes:
        return (text.replace(guard, "") if guard else text).encode(errors="replace")

    def piece(self, token: int) -> bytes:
        if token < 256:
            return bytes([token])
        marker = MARKERS[token - 256]
        return b"" if marker in CONTROL else marker.encode()

    def text(self, tokens: Sequence[int]) -> str:
        """The prompt that `tokens` stand for, markers included."""
        parts = [bytes([t]) if t < 256 else MARKERS[t - 256].encode() for t in tokens]
        return b"".join(parts).decode()


@dataclass
class Answer:
    """A scripted answer: `text` in chunks of `chunk` tokens, after `n_prefill` empty ones."""

    text: str | bytes | list[int]
    chunk: int = 3
    n_prefill: int = 1
    finish: FinishReason = "stop"

    def tokens(self) -> list[int]:
        if isinstance(self.text, str):
            return ByteVocab().tokenize(self.text, add_special=False)
        return list(self.text)


def logprobs_of(tokens: Sequence[int], n_top: int | None) -> list[TokenLogprobs] | None:
    """Made up so that each token's can be told from the others'; byte 0 is impossible."""
    if n_top is None:
        return None
    top = [(token, -token / 8 if token else -math.inf) for token in (1, 195, 0)][:n_top]
    return [TokenLogprobs(token, -token / 8, top) for token in tokens]


@dataclass
class Running:
    """One request of the engine below."""

    id: int
    prompt: Sequence[int]
    params: SamplingParams
    max_tokens: int
    options: RequestOptions
    answer: Answer
    n_steps: int = 0
    tokens: Sequence[int] = ()
    n_sent: int = 0
    stats: Stats = field(default_factory=Stats)


class ScriptedEngine:
    """Answers a prompt with what `script(prompt's text, how many requests came before)` gives;
    `show` makes that text. Drafts come from the drafter `source`.

    `steps`, when set, is a semaphore that every step takes one of: a test lets the engine go on.
    `failures` are raised by the steps of these numbers (from 1), `n_steps` counts them.
    """

    def __init__(
        self,
        script: Callable[[str, int], Answer],
        n_seq: int = 2,
        n_ctx: int = 1000,
        failures: dict[int, Exception] | None = None,
        show: Callable[[Sequence[int]], str] | None = None,
        source: str = "mtp",
    ) -> None:
        self.limits = EngineLimits(n_ctx, n_seq, 64, frozenset({257}))
        self.requests: list[Running] = []
        self.cancelled: list[int] = []
        self.steps: threading.Semaphore | None = None
        self.n_steps = 0
        self._script, self._source = script, source
        self._show = show or ByteVocab().text
        self._failures = failures or {}
        self._queue: list[Running] = []

    @property
    def is_idle(self) -> bool:
        return not self._queue

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        max_tokens: int,
        options: RequestOptions = PLAIN,
    ) -> int:
        self.limits.check(prompt, max_tokens)
        n = len(self.requests)
        answer = self._script(self._show(prompt), n)
        room = min(max_tokens, self.limits.n_ctx - len(prompt))
        running = Running(n + 1, list(prompt), params, room, options, answer)
        running.tokens = answer.tokens()
        running.stats = Stats(prefill_tokens=len(prompt) - 1, prefill_s=0.5)
        self.requests.append(running)
        self._queue.append(running)
        return running.id

    def step(self) -> list[Chunk]:
        if self.steps and not self.steps.acquire(timeout=PATIENCE_S):
            raise GgufMtpError("the test let nothing go on")
        self.n_steps += 1
        if self.n_steps in self._failures:
            raise self._failures[self.n_steps]
        return [self._advance(r) for r in self._queue[: self.limits.n_seq]]

    def _advance(self, r: Running) -> Chunk:
        r.n_steps += 1
        if r.n_steps <= r.answer.n_prefill:
            return Chunk(r.id, [], 0)
        n_whole = min(len(r.tokens), r.max_tokens)
        new = r.tokens[r.n_sent : min(r.n_sent + r.answer.chunk, n_whole)]
        r.n_sent += len(new)
        n_drafted = max(len(new) - 1, 0)
        r.stats += Stats(
            decode_tokens=len(new),
            decode_s=0.25,
            rounds=1,
            drafted=n_drafted,
            judged_per_position=[1] * n_drafted,
            accepted_per_position=[1] * n_drafted,
        )
        likely = logprobs_of(new, r.options.n_logprobs)
        chunk = Chunk(
            r.id, new, n_drafted, source=self._source, n_drafted=n_drafted, logprobs=likely
        )
        if r.n_sent < n_whole:
            return chunk
        self._queue.remove(r)
        finish: FinishReason = "length" if n_whole < len(r.tokens) else r.answer.finish
        return chunk._replace(finish_reason=finish, stats=r.stats)

    def cancel(self, id_: int) -> Chunk | None:
        for r in self._queue:
            if r.id == id_:
                self._queue.remove(r)
                self.cancelled.append(id_)
                return Chunk(id_, [], 0, "cancelled", r.stats)
        return None
