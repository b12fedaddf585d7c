"""Notices a drafter that never agrees with its target.

An MTP block that loads and computes may still be wired wrongly (converted with swapped inputs,
trained for another trunk), and so may a draft model: then not one draft is accepted, and no depth
is worth choosing.
"""

from __future__ import annotations

from gguf_mtp.depth.protocol import RoundFeedback


class Watchdog:
    """Counts each drafter's drafts until the first acceptance; `given_up` says of whom none was.

    Only drafts whose first token was judged count. After one acceptance a drafter is not watched
    any more: low acceptance is then a matter of cost, which the depth decision weighs itself. Who
    only copies is not watched at all: a text may begin to repeat itself at any time.
    """

    def __init__(self, n_drafts: int = 64) -> None:
        self.given_up: dict[str, str] = {}
        self._left: dict[str, int] = {}
        self._n_drafts = n_drafts

    def update(self, feedback: RoundFeedback) -> None:
        """Count one round's drafts."""
        free = [free_draft.source for free_draft in feedback.free_drafts]
        for one in feedback.judged:
            left = self._left.get(one.source, self._n_drafts)
            if not one.n_judged or left <= 0 or one.source in free:
                continue
            self._left[one.source] = left = 0 if one.n_accepted else left - 1
            if left == 0 and not one.n_accepted:
                self.given_up[one.source] = (
                    f"0 of {self._n_drafts} drafts were accepted: "
                    "the drafter does not match this model"
                )
