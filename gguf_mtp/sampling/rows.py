"""A row of logits as the sampling chain sees it: some tokens masked, some logits changed.

The row itself, as long as the vocabulary, is neither copied nor written: a comparison finds the few
tokens near the top, and only where those are not enough is everything looked at.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gguf_mtp.types import Floats

MARGIN = 8.0
"""How far below the maximum the likeliest tokens are looked for, before all are."""

Ids = NDArray[np.int64]


class Row:
    """float32 [n_vocab] `logits`, of which `ids` (rising) have the logits `values` instead, under a
    `mask` of what is allowed, bool [n_vocab].

    Where mask and bans leave nothing, the changes do not count; where the mask alone leaves
    nothing, neither does the mask: a token has to come.
    """

    __slots__ = ("_everything", "_near", "_peak", "ids", "logits", "mask", "values")

    def __init__(
        self,
        logits: Floats,
        mask: NDArray[np.bool_] | None = None,
        ids: Ids | None = None,
        values: Floats | None = None,
    ) -> None:
        self.logits, self.mask, self.ids, self.values = logits, mask, ids, values
        self._peak: float | None = None
        self._near: tuple[Ids, Floats] | None = None
        self._everything: tuple[Ids, Floats] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether nothing is masked or changed."""
        return self.mask is None and self.ids is None

    @property
    def peak(self) -> float:
        """The largest logit of the row as it came."""
        if self._peak is None:
            self._peak = float(self.logits.max())
        return self._peak

    @property
    def floor(self) -> float:
        """Every token that `near` leaves out is below this."""
        return self.peak - MARGIN

    def near(self) -> tuple[Ids, Floats]:
        """The tokens at or above `floor`, by rising id, and their logits; perhaps none.

        A comparison is several times cheaper than sorting or partitioning a whole vocabulary.
        """
        if self._near is None:
            ids: Ids = (self.logits >= self.floor).nonzero()[0]
            values = self.logits[ids]
            if not self.is_plain:
                ids, values = self._altered(ids, values)
            self._near = ids, values
        return self._near

    def top(self) -> tuple[Ids, Floats]:
        """What is near the top, or everything where that is nothing."""
        near = self.near()
        return near if len(near[0]) else self.everything()

    def best(self) -> int:
        """The likeliest token; of equal ones the first."""
        top = int(self.logits.argmax())
        if self.ids is not None and self.values is not None:
            place = int(self.ids.searchsorted(top))
            is_changed = place < len(self.ids) and self.ids[place] == top
            if is_changed or self.values.max() >= self.logits[top]:
                ids, logits = self.top()
                return int(ids[logits.argmax()])
        if self.mask is not None and not self.mask[top]:
            ids, logits = self.top()
            return int(ids[logits.argmax()])
        return top

    def everything(self) -> tuple[Ids, Floats]:
        """Every token that may come, by rising id, and its logit; at least one."""
        if self._everything is None:
            self._everything = self._all()
        return self._everything

    def _altered(self, ids: Ids, values: Floats) -> tuple[Ids, Floats]:
        """`near`, with changes and mask; `values` is written. The changes are few: they are looked
        up among the others, not the others among them."""
        if self.ids is not None and self.values is not None:
            place = ids.searchsorted(self.ids)
            is_here = ids[np.minimum(place, len(ids) - 1)] == self.ids
            is_high = self.values >= self.floor
            values[place[is_here]] = self.values[is_here]
            fallen, risen = is_here & ~is_high, ~is_here & is_high
            if risen.any():
                places, new = place[risen], self.values[risen]
                ids, values = (
                    np.insert(ids, places, self.ids[risen]),
                    np.insert(values, places, new),
                )
            if fallen.any():
                stays = values >= self.floor
                ids, values = ids[stays], values[stays]
        if self.mask is not None:
            allowed = self.mask[ids]
            ids, values = ids[allowed], values[allowed]
        return ids, values

    def _all(self) -> tuple[Ids, Floats]:
        everything = np.arange(len(self.logits))
        if self.is_plain:
            return everything, self.logits
        logits = self.logits
        if self.ids is not None:
            logits = logits.copy()
            logits[self.ids] = self.values
        ids = everything if self.mask is None else self.mask.nonzero()[0]
        ids = ids[logits[ids] > -np.inf]
        if not len(ids):
            logits = self.logits
            ids = self.mask.nonzero()[0] if self.mask is not None else everything
        if not len(ids):
            ids = everything
        return ids, logits[ids]
