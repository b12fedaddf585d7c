"""What a request asks for besides its prompt: how tokens are drawn, and what comes with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gguf_mtp.errors import RequestError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn from the target's logits. Defaults are llama.cpp's.

    `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 switch a filter off; `seed` None
    draws one. Raises `RequestError` when a value is out of range.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int | None = None

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, allowed: str) -> None:
            if not ok:
                raise RequestError(f"{name} is {getattr(self, name)}, but must be {allowed}")

        check(0 <= self.temperature < float("inf"), "temperature", "a finite number, 0 or more")
        check(self.top_k >= 0, "top_k", "0 (off) or more")
        check(0 < self.top_p <= 1, "top_p", "above 0 and at most 1 (off)")
        check(0 <= self.min_p <= 1, "min_p", "from 0 (off) to 1")
        check(self.seed is None or self.seed >= 0, "seed", "0 or more")


class Constraint(Protocol):
    """What may come next by a grammar; one object belongs to one answer.

    `allowed(after)`: bool [n_vocab], which tokens may follow what is committed and then `after`,
    tokens that were allowed one after the other; a view, valid until the next call. Only end tokens
    are allowed once the answer is complete. None where everything is (the grammar has not begun).
    `commit(tokens)`: these have joined the answer.
    """

    def allowed(self, after: Sequence[int]) -> NDArray[np.bool_] | None: ...
    def commit(self, tokens: Sequence[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """What one answer may ask for beyond sampling.

    `draft_max` bounds its drafts below what the depth decision would allow (0: none); `constraint`
    is a grammar its tokens obey.
    """

    draft_max: int | None = None
    constraint: Constraint | None = None


PLAIN = AnswerOptions()
"""Nothing beyond sampling."""
