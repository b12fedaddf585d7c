"""How a request wants its tokens drawn, as `SamplingParams` and `RequestOptions`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from gguf_mtp.engine.config import EngineLimits
from gguf_mtp.errors import RequestError
from gguf_mtp.grammar.matching import TokenVocabulary
from gguf_mtp.params import SamplingParams, sampler_order
from gguf_mtp.server.schemas import Generation

__all__ = ["params_of"]

_NAMES = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "presence_penalty",
    "frequency_penalty",
    "repeat_penalty",
    "repeat_last_n",
)


def params_of(
    defaults: SamplingParams, request: Generation, vocab: TokenVocabulary, limits: EngineLimits
) -> list[SamplingParams]:
    """One for each of the `n` answers; with a seed, each has its own: seed, seed + 1, ...

    Raises `RequestError` that names the field.
    """
    given: dict[str, Any] = {
        name: value for name in _NAMES if (value := getattr(request, name)) is not None
    }
    if request.repetition_penalty is not None:
        given.setdefault("repeat_penalty", request.repetition_penalty)
    if request.samplers is not None:
        given["samplers"] = sampler_order(request.samplers)
    biases = dict(defaults.logit_bias)
    for token, bias in _biases(request, vocab):
        biases[token] = biases.get(token, 0.0) + bias
    if request.ignore_eos:
        biases |= dict.fromkeys(sorted(limits.end_tokens), -math.inf)
    params = dataclasses.replace(defaults, **given, logit_bias=tuple(biases.items()))
    seed = defaults.seed if request.seed is None or request.seed < 0 else request.seed
    return [
        dataclasses.replace(params, seed=None if seed is None else seed + i)
        for i in range(request.n or 1)
    ]


def _biases(request: Generation, vocab: TokenVocabulary) -> Iterator[tuple[int, float]]:
    """OpenAI's map from ids, llama-server's pairs, and texts in the place of ids, whose every token
    is meant."""
    given = request.logit_bias or {}
    pairs = given.items() if isinstance(given, dict) else given
    for token, bias in pairs:
        value = _bias(token, bias)
        if isinstance(token, str):
            for id_ in _tokens(token, vocab):
                yield id_, value
        elif isinstance(token, int) and not isinstance(token, bool):
            yield token, value
        else:
            raise RequestError(f"logit_bias has {token!r} where a token is expected")


def _bias(token: object, bias: object) -> float:
    """False bans the token, as in llama-server."""
    if bias is False:
        return -math.inf
    if isinstance(bias, str | bool) or not isinstance(bias, int | float):
        raise RequestError(
            f"logit_bias gives token {token!r} the bias {bias!r}, which is not a number"
        )
    try:
        value = float(bias)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise RequestError(f"logit_bias gives token {token!r} a bias that is not finite")
    return value


def _tokens(key: str, vocab: TokenVocabulary) -> list[int]:
    """The id that `key` writes, or the tokens of the text that it is."""
    if key.removeprefix("-").isdecimal() and key.isascii() and len(key) < 20:
        return [int(key)]
    return vocab.tokenize(key, add_special=False)
