"""What a request asks for besides its prompt: how tokens are drawn, and what comes with them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gguf_mtp.errors import RequestError

SAMPLERS = ("penalties", "top_k", "typ_p", "top_p", "min_p", "temperature")
"""llama.cpp's names and order (`common_params_sampling::samplers`), of what this package knows."""

AS_MANY_AS_FIT = 1 << 30
"""max_tokens of an answer that may fill the context."""

LARGEST = 1e12
"""Of what is added to logits, and of what they are multiplied with or divided by: a bias, a penalty
and a temperature together leave float32 room."""

NEVER_ON = frozenset({"dry", "top_n_sigma", "xtc"})
"""Also in llama.cpp's order, but off until a value is given that no request can give here."""


_LETTERS = {
    "e": "penalties", "d": "dry", "s": "top_n_sigma", "k": "top_k", "y": "typ_p", "p": "top_p",
    "m": "min_p", "x": "xtc", "t": "temperature",
}  # fmt: skip
"""llama.cpp's (`common_sampler_type_to_chr`)."""


def sampler_order(names: str | Sequence[str]) -> tuple[str, ...]:
    """`names` as llama.cpp understands them (`top-k`, `topk`, `temp`, ...), in `SAMPLERS`' words.

    A text is read as names between semicolons, or as llama.cpp's letters, such as "kpmt".

    Those of `NEVER_ON` are left out. Raises `RequestError` for a name that is not known, and for
    one that comes twice.
    """
    known = {s: s for s in (*SAMPLERS, *NEVER_ON)}
    known |= {s.replace("_", "-"): s for s in known} | {s.replace("_", ""): s for s in known}
    known |= {"nucleus": "top_p", "temp": "temperature", "typ": "typ_p"}
    if isinstance(names, str):
        is_letters = names.lower() not in known and set(names.lower()) <= set(_LETTERS)
        known, names = (_LETTERS, list(names)) if is_letters else (known, names.split(";"))
    order: list[str] = []
    for name in names:
        sampler = known.get(name.lower())
        if sampler is None:
            raise RequestError(f"unknown sampler {name!r}; known samplers: {', '.join(SAMPLERS)}")
        if sampler in order:
            raise RequestError(f"the sampler {sampler} appears twice")
        order.append(sampler)
    return tuple(s for s in order if s not in NEVER_ON)


_NUMBERS = (
    "temperature", "top_k", "top_p", "min_p", "typical_p", "repeat_penalty", "repeat_last_n",
    "presence_penalty", "frequency_penalty",
)  # fmt: skip


def bias_of(text: str) -> tuple[int, float]:
    """`15043+1`, `15043-2.5`, `15043-inf`: a token and what is added to its logit.

    Raises `RequestError` for any other text.
    """
    parts = re.fullmatch(r"(\d+)([+-](?:\d+\.?\d*|\.\d+|inf))", text)
    if parts is None:
        raise RequestError(f"{text!r} is not a bias: write a token id, + or -, and a number")
    return int(parts[1]), float(parts[2])


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn from the target's logits. Defaults are llama.cpp's.

    `temperature` 0 is greedy; `top_k` 0 or -1, `top_p` 1, `min_p` 0 and `typical_p` 1 switch a
    filter off. A `seed` makes the text the same on every run; None draws one. The penalties count
    the last `repeat_last_n` tokens, the prompt's among them (0: off, -1: all). `logit_bias` holds
    ids and what is added to their logits; -inf bans a token. `samplers` names what is applied, in
    order (`sampler_order` reads other spellings). Raises `RequestError` when a value is out of
    range.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int | None = None
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    samplers: tuple[str, ...] = SAMPLERS

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, allowed: str) -> None:
            if not ok:
                raise RequestError(f"{name} is {getattr(self, name)!r}, but must be {allowed}")

        for name in _NUMBERS:
            check(isinstance(getattr(self, name), (int, float)), name, "a number")
        ok = self.temperature == 0 or 1 / LARGEST <= self.temperature <= LARGEST
        check(ok, "temperature", f"0 or from {1 / LARGEST:g} to {LARGEST:g}")
        check(self.top_k >= -1, "top_k", "0 or -1 (off), or more")
        check(0 < self.top_p <= 1, "top_p", "above 0 and at most 1 (off)")
        check(0 <= self.min_p <= 1, "min_p", "from 0 (off) to 1")
        check(self.seed is None or self.seed >= 0, "seed", "0 or more")
        check(0 < self.typical_p <= 1, "typical_p", "above 0 and at most 1 (off)")
        ok = 1 / LARGEST <= self.repeat_penalty <= LARGEST
        check(ok, "repeat_penalty", f"from {1 / LARGEST:g} to {LARGEST:g}; 1 is off")
        check(self.repeat_last_n >= -1, "repeat_last_n", "a count, 0 (off) or -1 (all)")
        for name in ("presence_penalty", "frequency_penalty"):
            check(abs(getattr(self, name)) <= LARGEST, name, f"at most {LARGEST:g}; 0 is off")
        for token, bias in self.logit_bias:
            if token < 0 or not (abs(bias) <= LARGEST or bias == -math.inf):
                said = f"logit_bias gives token {token} the bias {bias}"
                raise RequestError(
                    f"{said}, but ids are 0 or more and a bias is at most {LARGEST:g}, or -inf"
                )
        if sampler_order(self.samplers) != self.samplers:
            raise RequestError(f"samplers are {self.samplers}, but must be named as in {SAMPLERS}")

    def check_vocabulary(self, n_vocab: int) -> None:
        """Raises `RequestError` for a `logit_bias` whose id no token of the vocabulary has."""
        for token, _ in self.logit_bias:
            if token >= n_vocab:
                said = f"logit_bias names token {token}"
                raise RequestError(f"{said}, but the vocabulary ends at {n_vocab - 1}")


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
class RequestOptions:
    """What one answer may ask for beyond sampling.

    `draft_max` bounds its drafts below what the depth decision would allow (0: none); of the
    drafters there are only those that `draft` names may draft (None: all; see `drafters.registry`).
    `constraint` is a grammar its tokens obey. `n_logprobs` asks for every token's log-probability,
    and for as many of the likeliest ids beside it; None asks for none. `stop_tokens` end the answer
    as the model's own end tokens do. Without `cache_prompt` the whole prompt is read, whatever
    slots hold of it: llama.cpp's results differ a little with how the cache came about. `chain`, a
    `sampling.chain.SamplingChain`, takes the place of the one that the parameters would make; it
    belongs to one answer.
    """

    draft_max: int | None = None
    constraint: Constraint | None = None
    n_logprobs: int | None = None
    stop_tokens: frozenset[int] = frozenset()
    draft: tuple[str, ...] | None = None
    cache_prompt: bool = True
    chain: Any = None

    def __post_init__(self) -> None:
        if self.n_logprobs is not None and self.n_logprobs < 0:
            raise RequestError(f"n_logprobs is {self.n_logprobs}, but must be 0 or more")


PLAIN = RequestOptions()
"""Nothing beyond sampling."""
