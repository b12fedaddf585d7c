"""What a user may demand of the draft depth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gguf_mtp.errors import RequestError


@dataclass(frozen=True, slots=True)
class DepthOptions:
    """Bounds of a draft: 0, or `draft_min` to `draft_max` tokens, each but the certain ones with a
    confidence of at least `draft_p_min`. `blocks[name]` is the most tokens of a drafter that makes
    them all at once: its drafts cost the same however long. Free drafts have a bound of their own,
    `free_max`, by default the same; with them a decode has at most `most_rows` rows. Raises
    `RequestError` when they make no sense."""

    draft_min: int = 0
    draft_max: int = 8
    draft_p_min: float = 0.0
    blocks: Mapping[str, int] = field(default_factory=dict)
    free_max: int | None = None
    most_rows: int | None = None

    def __post_init__(self) -> None:
        if self.draft_max < 0:
            raise RequestError(f"draft_max is {self.draft_max}, but must be 0 (off) or more")
        if not 0 <= self.draft_min <= self.draft_max:
            raise RequestError(
                f"draft_min is {self.draft_min}, but must be from 0 to draft_max ({self.draft_max})"
            )
        if not 0 <= self.draft_p_min <= 1:
            raise RequestError(f"draft_p_min is {self.draft_p_min}, but must be from 0 (off) to 1")

    def longest(self, drafter: str) -> int:
        """The most tokens that a draft of this drafter may have."""
        return min(self.draft_max, self.blocks.get(drafter, self.draft_max))

    @property
    def longest_free(self) -> int:
        """The most tokens that a free draft may have."""
        return self.draft_max if self.free_max is None else self.free_max

    @property
    def is_fixed(self) -> bool:
        """Equal bounds leave nothing to decide."""
        return self.draft_min == self.draft_max
