"""Log-probabilities in OpenAI's two shapes: objects in chats, parallel lists in completions.

Both have an entry for every token of the answer that `return_token_ids` would name, reasoning
included.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gguf_mtp.types import TokenLogprobs

__all__ = ["ChatLogprobs", "CompletionLogprobs"]

LEAST = -9999.0
"""What OpenAI writes where the probability is zero: JSON has no infinity."""

Piece = Callable[[int], bytes]


class ChatLogprobs:
    """One choice's `logprobs` in a chat; `piece` gives a token's bytes."""

    def __init__(self, piece: Piece) -> None:
        self._piece = piece

    def shape(self, entries: Iterable[TokenLogprobs]) -> dict[str, Any]:
        """Of `entries`, which follow those that were shaped before."""
        content = [
            self._entry(e.token, e.logprob)
            | {"top_logprobs": [self._entry(token, logprob) for token, logprob in e.top]}
            for e in entries
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._piece(token)
        text = raw.decode("utf-8", errors="replace")
        return {"token": text, "logprob": max(logprob, LEAST), "bytes": list(raw)}


class CompletionLogprobs:
    """One choice's `logprobs` in a completion. `text_offset` is where a token's text begins, in
    characters of the choice's text; a character of several tokens begins with its first."""

    def __init__(self, piece: Piece) -> None:
        self._piece = piece
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._n_chars = 0

    def shape(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Of `entries`, which follow those that were shaped before."""
        offsets = []
        for entry in entries:
            offsets.append(self._n_chars)
            self._n_chars += len(self._decoder.decode(self._piece(entry.token)))
        return {
            "tokens": [self._name(entry.token) for entry in entries],
            "token_logprobs": [max(entry.logprob, LEAST) for entry in entries],
            "top_logprobs": [
                {self._name(t): max(p, LEAST) for t, p in (*e.top, (e.token, e.logprob))}
                for e in entries
            ],
            "text_offset": offsets,
        }

    def _name(self, token: int) -> str:
        """A token's text; of a part of a character its bytes, as OpenAI writes them."""
        raw = self._piece(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
