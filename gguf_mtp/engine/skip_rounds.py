"""Rounds in which nobody asks whether to draft, so that asking costs next to nothing.

A decision takes Python a tenth of a millisecond. A model of a hundred milliseconds a token does not
notice; one of a millisecond does, and where drafting does not pay it would lose that in every
round. So an answer of "nobody drafts" stands for some further rounds: as many as the depth decision
allows, and no more than make asking cheap. What those rounds took is told with the next one.
"""

from __future__ import annotations

from collections.abc import Sequence

from gguf_mtp.depth.protocol import SkippedRounds
from gguf_mtp.engine.request import RoundTimes, SequenceStep
from gguf_mtp.types import DraftLimit

_SHARE = 0.005  # of the time of rounds without drafts that deciding may take
_MEMORY = 8  # decisions over which their cost is averaged


class SkipRounds:
    """The rounds that are left of a rest, and what the past ones took."""

    def __init__(self) -> None:
        self._left = 0
        self._steps: list[tuple[int, DraftLimit]] = []  # request and limit of the last decision
        self._seconds: list[float] = []
        self._draft_s = 0.0
        self._cost_s = 0.0

    def skips(self, steps: Sequence[SequenceStep]) -> bool:
        """Whether these steps need no decision; then they get the last one's limits."""
        if not self._left or [t.request.id for t in steps] != [id_ for id_, _ in self._steps]:
            self._left = 0
            return False
        self._left -= 1
        for step, (_, limit) in zip(steps, self._steps, strict=True):
            step.limit = limit
        return True

    def update(self, times: RoundTimes, seconds: float) -> None:
        """A round of the rest took `seconds`."""
        self._seconds.append(seconds - times.draft_s)
        self._draft_s += times.draft_s

    def take(self) -> SkippedRounds | None:
        """What has passed since this was asked last."""
        if not self._seconds:
            return None
        passed = SkippedRounds(len(self._steps), self._seconds, self._draft_s)
        self._seconds, self._draft_s = [], 0.0
        return passed

    def end(self) -> None:
        """The next round needs a decision."""
        self._left = 0

    def begin(
        self, steps: Sequence[SequenceStep], most: int, cost_s: float, round_s: float
    ) -> None:
        """After a decision for `steps` that took `cost_s` in a round of `round_s` seconds: rests at
        most `most` rounds."""
        self._left = 0
        if most:
            self._cost_s += (cost_s - self._cost_s) / _MEMORY if self._cost_s else cost_s
            self._left = min(most, int(self._cost_s / (_SHARE * round_s)))
            self._steps = [(t.request.id, t.limit or DraftLimit(0)) for t in steps]
