"""Notices a draft head that never agrees with its target.

A block that loads and computes may still be wired wrongly (converted with swapped inputs, trained
for another trunk): then not one draft is accepted, and no depth is worth choosing.
"""

from __future__ import annotations

from collections.abc import Sequence

from gguf_mtp.types import Judged


class Watchdog:
    """Counts drafts until the first acceptance; `reason` says why drafting should stop for good.

    Only drafts whose first token was judged count. After one acceptance the watchdog sleeps: low
    acceptance is then a matter of cost, which the depth decision weighs itself.
    """

    def __init__(self, n_drafts: int = 64) -> None:
        self.reason: str | None = None
        self._left = n_drafts
        self._n_drafts = n_drafts

    def see(self, judged: Sequence[Judged]) -> None:
        """Count one round's drafts."""
        if self._left <= 0:
            return
        for one in judged:
            if one.n_accepted:
                self._left = 0
                return
            self._left -= one.n_judged > 0
        if self._left <= 0:
            n = self._n_drafts
            self.reason = f"0 of {n} drafts were accepted: the draft head does not fit this model"
