"""Drafting by looking up: what followed the last tokens when they stood there before.

Prompt lookup (Saxena 2023; the same idea as LLMA, arXiv 2304.04487) over prompt and answer: code,
quotations and lists repeat themselves word for word. A draft takes microseconds and no context. It
knows nothing of models, logits or hidden rows: any model can draft with it.

An index of hash chains as in LZ77: per n-gram length the newest position of each n-gram, and from
every position to the one before it with the same n-gram. So a committed token costs one entry per
length, and taking back the newest token restores exactly what was there before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gguf_mtp.drafters.spec import DrafterSpec
from gguf_mtp.types import Ask, Draft, Rows

SIZES = (6, 3, 2)
"""Lengths of n-grams that are indexed, longest first: the first one found decides. Single tokens
recur by chance in any text, so two in a row are the least worth a guess."""
N_CANDIDATES = 8
"""Earlier places with the same n-gram that are looked at, newest first, for the longest match."""
LONGEST = 40
"""Tokens of a match beyond which a longer one says nothing more."""


class NgramDrafter:
    """A `types.Drafter` that copies; `n_seq` sequences.

    `confidence` is 1 - 1 / length of the match, which grows along a draft, for its tokens have
    then matched too: a measure to be calibrated. Of matches of one length the newest counts.
    """

    name = "ngram"
    is_free = True

    def __init__(self, n_seq: int) -> None:
        self._indices = [_Index() for _ in range(n_seq)]

    def observe(self, rows: Sequence[Rows]) -> None:
        """Takes the tokens of `rows`; hidden rows are not looked at."""
        for r in rows:
            index = self._indices[r.seq]
            n = len(index.tokens)
            assert r.pos == n, f"row {r.pos} observed, row {n} expected"
            index.tokens += r.tokens

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """One draft per ask, in order; empty where nothing like the last tokens stood before."""
        return [self._propose(ask) for ask in asks]

    def rewind(self, seq: int, n: int) -> None:
        """Forgets the tokens from position max(n - 1, 0) on; the next row observed stands there."""
        self._indices[seq].keep(max(n - 1, 0))

    def copy(self, src: int, dst: int, n: int) -> None:
        """Makes `dst` start with the first `n` certain tokens of `src`."""
        self._refill(dst, self._indices[src].tokens[: max(n - 1, 0)])

    def save(self, seq: int) -> bytes:
        """The tokens as int32, little-endian: the index follows from them."""
        return np.array(self._indices[seq].tokens, "<i4").tobytes()

    def load(self, seq: int, data: bytes) -> None:
        """Puts saved bytes in the place of what the sequence held."""
        self._refill(seq, np.frombuffer(data, "<i4").tolist())

    def _refill(self, seq: int, tokens: Sequence[int]) -> None:
        index = self._indices[seq] = _Index()
        index.tokens += tokens

    def _propose(self, ask: Ask) -> Draft:
        tokens, n = ask.tokens, ask.limit.n
        found = self._indices[ask.seq].find(tokens) if n > 0 else None
        if found is None:
            return Draft((), (), (), self.name)
        start, length = found
        # What follows runs into the end of the text when it repeats itself: then the draft goes on
        # with its own beginning, the period being the distance to the match.
        draft = list(tokens[start : start + n])
        while len(draft) < n:
            draft.append(draft[len(draft) - (len(tokens) - start)])
        sure = [1 - 1 / (length + k) for k in range(n)]
        p_min = ask.limit.p_min
        n = next((k for k in range(min(n, len(p_min))) if sure[k] < p_min[k]), n)
        return Draft(draft[:n], [None] * n, sure[:n], self.name)


class _Index:
    """Where n-grams of `tokens` end. `before[s][p]`: the position before p at which the n-gram of
    length SIZES[s] that ends at p ended too, or -1. New tokens are indexed when something is looked
    for."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._n_indexed = 0
        self._newest: list[dict[tuple[int, ...], int]] = [{} for _ in SIZES]
        self._before: list[list[int]] = [[] for _ in SIZES]

    def _catch_up(self) -> None:
        for at in range(self._n_indexed, len(self.tokens)):
            self._add(at)
        self._n_indexed = len(self.tokens)

    def _add(self, at: int) -> None:
        for n, newest, before in zip(SIZES, self._newest, self._before, strict=True):
            if at + 1 < n:
                before.append(-1)
                continue
            key = tuple(self.tokens[at + 1 - n : at + 1])
            before.append(newest.get(key, -1))
            newest[key] = at

    def keep(self, n_tokens: int) -> None:
        """Takes the newest tokens back until `n_tokens` are left."""
        del self.tokens[max(n_tokens, self._n_indexed) :]
        while len(self.tokens) > n_tokens:
            end = len(self.tokens)
            for n, newest, before in zip(SIZES, self._newest, self._before, strict=True):
                previous = before.pop()
                if end < n:
                    continue
                key = tuple(self.tokens[end - n :])
                if previous < 0:
                    del newest[key]
                else:
                    newest[key] = previous
            self.tokens.pop()
        self._n_indexed = min(self._n_indexed, n_tokens)

    def find(self, tokens: Sequence[int]) -> tuple[int, int] | None:
        """The position behind the longest match with the end of `tokens`, and its length; None
        without one. `tokens` are the indexed ones and those not observed yet."""
        self._catch_up()
        end = len(tokens)
        for n, newest, before in zip(SIZES, self._newest, self._before, strict=True):
            if end <= n:
                continue
            at = newest.get(tuple(tokens[end - n :]), -1)
            if at == end - 1:  # the end itself, where all tokens were observed
                at = before[at]
            best, length = -1, 0
            for _ in range(N_CANDIDATES):
                if at < 0:
                    break
                matched = _match(tokens, at, n)
                if matched > length:
                    best, length = at, matched
                at = before[at]
            if best >= 0:
                return best + 1, length
        return None


def _match(tokens: Sequence[int], at: int, n: int) -> int:
    """How many tokens up to `at` equal the last ones, at most LONGEST; `n` do."""
    end = len(tokens) - 1
    most = min(LONGEST, at + 1)
    while n < most and tokens[at - n] == tokens[end - n]:
        n += 1
    return n


SPEC = DrafterSpec("ngram", "n-gram copies", lambda parts: NgramDrafter(parts.n_seq), is_free=True)
