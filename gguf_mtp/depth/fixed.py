"""The same draft depth in every round: what equal bounds ask for, and what tests pin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gguf_mtp.depth.protocol import DraftRequest, RoundFeedback
from gguf_mtp.depth.watchdog import Watchdog
from gguf_mtp.errors import RequestError
from gguf_mtp.types import DraftLimit


class FixedDepth:
    """Drafts `n` tokens wherever they fit, with the first drafter that can; the watchdog gives up
    those of whom nothing is ever accepted.

    `FixedDepth(0)` never drafts: plain decoding. `p_min` bounds every position of a draft as
    `DraftLimit.p_min` does, `blocks` are as `DepthOptions` has them. Raises `RequestError` for a
    negative depth or a `p_min` outside 0 to 1.
    """

    def __init__(self, n: int, p_min: float = 0.0, blocks: Mapping[str, int] | None = None) -> None:
        if n < 0:
            raise RequestError(f"the draft depth is {n}, but must be 0 (off) or more")
        if not 0 <= p_min <= 1:
            raise RequestError(f"draft_p_min is {p_min}, but must be from 0 (off) to 1")
        self._n, self._blocks = n, blocks or {}
        self._p_min = (p_min,) * n if p_min > 0 else ()
        self._watchdog = Watchdog()

    @property
    def n_max(self) -> int:
        return self._n

    @property
    def n_max_free(self) -> int:
        return self._n

    @property
    def given_up(self) -> Mapping[str, str]:
        return self._watchdog.given_up

    @property
    def n_skip(self) -> int:
        return 0

    def choose(self, requests: Sequence[DraftRequest]) -> list[DraftLimit]:
        return [self._limit(room) for room in requests]

    def _limit(self, room: DraftRequest) -> DraftLimit:
        source = next((name for name in room.drafters if name not in self.given_up), None)
        if source is None:
            return DraftLimit(0)
        n = min(self._n, room.n_max)
        if room.free_draft and source == room.free_draft.source:
            return DraftLimit(min(n, len(room.free_draft.confidence)), (), source=source)
        return DraftLimit(min(n, self._blocks.get(source, n)), self._p_min, source=source)

    def record(self, feedback: RoundFeedback) -> None:
        self._watchdog.update(feedback)

    def forget(self, seq: int) -> None:
        """Nothing is kept per sequence."""
