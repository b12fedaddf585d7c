"""Do two models have one vocabulary? A draft model's tokens are the target's own, or nonsense.

Compared by the headers: size, text of each id, and the ids that begin and end a text. llama.cpp's
server lets sizes differ by up to 128; here they are equal, as a draft of an id that the target does
not have could not be judged. Knows nothing of weights.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from gguf_mtp.gguf.header import raw_metadata
from gguf_mtp.types import ModelFacts

_TEXTS = "tokenizer.ggml.tokens"
_KIND = "tokenizer.ggml.model"
_SPECIAL = ("bos", "eos")
_HEAD = 4 + 4 + 8  # bytes before the first text: type of the value, type of its items, their number


def why_not_one(model: ModelFacts, draft: ModelFacts) -> str | None:
    """The first difference in a clause ("its vocabulary has 10 tokens, the model's 12"), or None.

    Raises `LoadFailed` when a header cannot be read.
    """
    if draft.n_vocab != model.n_vocab:
        return f"its vocabulary has {draft.n_vocab} tokens, but the model's has {model.n_vocab}"
    ours, theirs = (facts.kv.get(_KIND) for facts in (model, draft))
    if ours != theirs:
        return f"its tokenizer is {theirs!r}, but the model's is {ours!r}"
    for name in _SPECIAL:
        key = f"tokenizer.ggml.{name}_token_id"
        ours, theirs = (facts.kv.get(key) for facts in (model, draft))
        if ours != theirs:
            return f"its {name} token is {theirs}, but the model's is {ours}"
    raw = [raw_metadata(facts.path).get(_TEXTS, b"") for facts in (model, draft)]
    if raw[0] == raw[1]:
        return None
    for i, (our, their) in enumerate(zip(_texts(raw[0]), _texts(raw[1]), strict=False)):
        if our != their:
            ours, theirs = (text.decode(errors="replace") for text in (our, their))
            return f"its token {i} is {theirs!r}, but the model's is {ours!r}"
    return "their vocabularies have different lengths"


def _texts(raw: bytes) -> Iterator[bytes]:
    """The texts in an array of strings as a header holds it."""
    at = _HEAD
    while at < len(raw):
        (size,) = struct.unpack_from("<Q", raw, at)
        at += 8 + size
        yield raw[at - size : at]
