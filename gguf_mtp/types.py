"""The types and protocols that every module shares.

Values are frozen dataclasses or named tuples. This module imports numpy, `errors` and `stats`:
whoever has read it knows what travels through the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from gguf_mtp.errors import GgufMtpError
from gguf_mtp.stats import Stats

Floats = NDArray[np.float32]
FinishReason = Literal["stop", "length", "cancelled", "failed"]


class Distribution(NamedTuple):
    """A distribution over the tokens that survived the filters.

    `ids`: int64 [n]; `probs`: float64 [n], sums to 1. Greedy choice is one id with probability 1.
    """

    ids: NDArray[np.int64]
    probs: NDArray[np.float64]


class Draft(NamedTuple):
    """Guessed tokens of one sequence.

    `probs[k]` is the distribution that `tokens[k]` was drawn from, or None when the token was
    certain (a point mass). `confidence[k]` measures how sure the drafter's unfiltered distribution
    is at position k: its largest probability, from 0 to 1. `source` names the drafter ("mtp",
    "ngram", ...).
    """

    tokens: Sequence[int]
    probs: Sequence[Distribution | None]
    confidence: Sequence[float]
    source: str


class TokenLogprobs(NamedTuple):
    """A token of the answer, its natural log-probability, and the likeliest ids with theirs.

    `top` falls; it holds the token itself only where it is among the likeliest.
    """

    token: int
    logprob: float
    top: Sequence[tuple[int, float]]


class Verdict(NamedTuple):
    """`tokens[:n_accepted]` of a draft are kept and `next_token` follows them."""

    n_accepted: int
    next_token: int


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive rows of one sequence: `tokens[i]` stands at position `pos + i`.

    The last `n_outputs` rows want logits. `hidden`, float32 [len(tokens), n_embd], is an input of
    an MTP decode, and what the target computed for these rows when they are handed to
    `Drafter.observe`.
    """

    seq: int
    pos: int
    tokens: Sequence[int]
    n_outputs: int = 0
    hidden: Floats | None = None


class Output(NamedTuple):
    """What a decode computed for one `Rows`.

    `logits`: float32 [n_outputs, n_vocab]; `hidden`: float32 [len(tokens), width], or None when
    the context does not put hidden rows out. They are what a drafter beside it reads: rows behind
    the last layer, or what several layers read, side by side. Both are views into llama.cpp's
    buffers, valid until the next decode of the same context: whoever keeps, copies.
    """

    logits: Floats
    hidden: Floats | None


class Step(NamedTuple):
    """One decode: an `Output` for each `Rows` that went in, and its wall time in seconds."""

    outputs: Sequence[Output]
    seconds: float


class Decoder(Protocol):
    """One llama.cpp context (`llama.Context`), or a fake in tests.

    `n_past(seq)` is the position after the sequence's last row; 0 when it is empty. `decode` takes
    rows of several sequences, one `Rows` per sequence, and raises `DecodeError` with every sequence
    of the batch rewound to where it was, or emptied where the cache cannot go back. `rewind(seq,
    n)` drops the rows at positions >= n; dropping none is legal. Of a sequence's latest decode the
    rows with logits but the first can always be dropped, once; what else can depends on the cache:
    it raises `CannotRewind` and is never half done. So does `copy`, which makes `dst` start with
    the first `n` rows of `src`. `save` gives a sequence's bytes; `load` puts them in the place of
    what the sequence held and returns its `n_past`, or raises `SavedStateError` and leaves it
    empty.
    """

    def n_past(self, seq: int) -> int: ...
    def decode(self, rows: Sequence[Rows]) -> Step: ...
    def rewind(self, seq: int, n_past: int) -> None: ...
    def copy(self, src: int, dst: int, n_past: int) -> None: ...
    def save(self, seq: int) -> bytes: ...
    def load(self, seq: int, data: bytes) -> int: ...


class DraftLimit(NamedTuple):
    """How far one sequence's next draft may go.

    At most `n` tokens (0: none). The draft ends before position k when its confidence there is
    below `p_min[k]`; positions past the end of `p_min` have no such bound. The rule looks at the
    draft distribution's maximum and never at the token drawn: otherwise the output distribution
    would shift. `source` names the drafter, one of the `DraftRequest`'s; `reason` is for people:
    why so far, in a word or two.
    """

    n: int
    p_min: Sequence[float] = ()
    reason: str = ""
    source: str = ""


class Chain(Protocol):
    """A sequence's sampling chain (`sampling.chain.SamplingChain`): logits to distributions, and
    draws from them.

    `after` are draft tokens that follow the committed ones: row k of a draft sees `draft[:k]`.
    `target_probs` maps a target's float32 [n_vocab] to the distribution of the token there;
    `draft_probs` gives the one that a drafter draws from, and the drafter's confidence; `draw`
    draws from either. `commit(tokens)`: these have joined the answer.
    """

    @property
    def is_greedy(self) -> bool: ...
    def target_probs(self, logits: Floats, after: Sequence[int] = ()) -> Distribution: ...
    def draft_probs(
        self, logits: Floats, after: Sequence[int] = ()
    ) -> tuple[Distribution, float]: ...
    def draw(self, dist: Distribution, after: Sequence[int] = ()) -> int: ...
    def commit(self, tokens: Sequence[int]) -> None: ...


class Ask(NamedTuple):
    """A request for one draft: `tokens` are certain, the last one not decoded by the target yet."""

    seq: int
    tokens: Sequence[int]
    limit: DraftLimit
    chain: Chain


class Drafter(Protocol):
    """Guesses tokens. It sees certain tokens only, and decides neither how many nor whether.

    `observe(rows)`: these rows were decoded by the target and are certain; rows of one sequence
    come exactly once and in order, with the `hidden` rows of a target that puts them out. `propose`
    has no lasting effect on what is certain and answers each ask in order; `limit.n == 0` is legal
    and gives an empty draft. `rewind(seq, n)`: `tokens[:n]` stay certain, later ones never were;
    the next row observed is position max(n - 1, 0). `copy`, `save` and `load` are as the decoder's,
    with what is buffered. The drafts of a drafter that `is_free` take microseconds and are point
    masses: they are made before the depth is decided.
    """

    name: str
    is_free: bool

    def observe(self, rows: Sequence[Rows]) -> None: ...
    def propose(self, asks: Sequence[Ask]) -> list[Draft]: ...
    def rewind(self, seq: int, n: int) -> None: ...
    def copy(self, src: int, dst: int, n: int) -> None: ...
    def save(self, seq: int) -> bytes: ...
    def load(self, seq: int, data: bytes) -> None: ...


class Chunk(NamedTuple):
    """What one round added to one sequence. The last chunk carries `finish_reason` and `stats`.

    `tokens` are committed, an end token never among them; the first `n_from_draft` were drafted,
    out of `n_drafted` by the drafter `source`.
    `logprobs` has an entry for each of them when the request asked for it. `error` is why a request
    "failed".
    """

    seq: int
    tokens: Sequence[int]
    n_from_draft: int
    finish_reason: FinishReason | None = None
    stats: Stats | None = None
    logprobs: Sequence[TokenLogprobs] | None = None
    source: str = ""
    n_drafted: int = 0
    error: GgufMtpError | None = None


class TensorInfo(NamedTuple):
    """One tensor of a GGUF header: `shape` innermost first, `type` a ggml type's name."""

    name: str
    shape: tuple[int, ...]
    type: str
    n_bytes: int
    offset: int
    file: str


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a GGUF header says (`gguf.model_facts`).

    `n_layer` counts trunk layers, `n_mtp` NextN blocks. `can_draft` is whether the pinned llama.cpp
    can draft with the file's own MTP block, `reason` why or why not, in one sentence. `kv` holds
    every metadata value except large arrays, of which `kv` has the length only.
    """

    path: str
    architecture: str
    name: str
    n_layer: int
    n_mtp: int
    n_embd: int
    n_vocab: int
    context_length: int
    n_expert: int
    n_expert_used: int
    can_draft: bool
    reason: str
    tensors: tuple[TensorInfo, ...]
    kv: dict[str, Any]
