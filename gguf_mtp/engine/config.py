"""What an engine was sized for, and which requests that leaves room for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gguf_mtp.errors import ContextFull, RequestError

MAX_THREADS = 512
"""ggml's own bound; with millions of them OpenMP ends the process."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """`n_ctx`: tokens of one sequence, prompt and answer; `n_seq`: sequences at once; `n_batch`:
    rows of one target decode. `end_tokens` end an answer and are never part of it. `fingerprint`
    names the model and its cache settings: saved sequences of another one are refused. `n_idle`:
    cells that idle prefixes may hold while others decode."""

    n_ctx: int
    n_seq: int
    n_batch: int
    end_tokens: frozenset[int]
    fingerprint: str = ""
    n_idle: int = 1 << 40

    def check(self, prompt: Sequence[int], max_tokens: int) -> None:
        """Raises `RequestError` for an empty prompt or `max_tokens` below 1, `ContextFull` when the
        prompt leaves no room for an answer."""
        if not prompt:
            raise RequestError("the prompt is empty, and this model adds no BOS token")
        if max_tokens < 1:
            raise RequestError(f"max_tokens is {max_tokens}, but must be 1 or more")
        if len(prompt) >= self.n_ctx:
            raise ContextFull(len(prompt), self.n_ctx)
