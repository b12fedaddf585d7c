"""The seam between the engine and whoever decides about drafts.

What is asked before a round (`DraftRequest`), what is told after it (`RoundFeedback`), and the
decision itself (`Depth`); `depth` has those there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from gguf_mtp.types import DraftLimit


class FreeDraft(NamedTuple):
    """A draft already made, by a drafter that is free: `confidence` has one entry per token."""

    source: str
    confidence: Sequence[float]


class DraftRequest(NamedTuple):
    """A sequence that may draft next; `n_max` tokens fit its max_tokens and context.

    `drafters` may draft for it, the preferred one first; the one that made the `free_draft`, if
    any, is among them.
    """

    seq: int
    n_max: int
    drafters: Sequence[str] = ("",)
    free_draft: FreeDraft | None = None


class DraftResult(NamedTuple):
    """One draft, judged.

    `confidence` has one entry per drafted token. The target looked at `n_judged` of them, up to its
    first refusal or the answer's end, and agreed with `n_accepted`.
    """

    seq: int
    confidence: Sequence[float]
    n_accepted: int
    n_judged: int
    source: str = ""


class SkippedRounds(NamedTuple):
    """Rounds without drafts that passed without a decision: `seconds` has the time of each one's
    target decode, of `n_rows` rows, and what is around it; `draft_s` is what the drafters took to
    observe them all."""

    n_rows: int = 0
    seconds: Sequence[float] = ()
    draft_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RoundFeedback:
    """What a round cost: times in seconds, from wall clocks read after the work was done.

    `judged` has a sequence's draft, maybe an empty one; `free_drafts` those that were in hand, sent
    to the target or not, compared with what the answer became. `n_rows` rows of the target decode
    verified drafts or continued a sequence, `n_prefill` more were prompt rows. `n_cells` is how
    many positions the decoded sequences held together. Of `draft_s`, `seconds_of` gives each
    drafter's; all is the only drafter's where it is empty. `skipped` came before this round and
    after the last one recorded, if any did.
    """

    judged: Sequence[DraftResult]
    n_rows: int
    n_prefill: int
    n_cells: int
    target_s: float
    draft_s: float
    other_s: float
    free_drafts: Sequence[DraftResult] = ()
    seconds_of: Mapping[str, float] = field(default_factory=dict)
    skipped: SkippedRounds | None = None


class Depth(Protocol):
    """Decides how far each sequence drafts next, and with which drafter (`depth`).

    `n_max` is the largest depth it will ever choose, `n_max_free` that of free drafts. `given_up`
    says, by drafter and in a sentence, who will not be asked again. `choose` answers each room in
    order; the `record` that follows covers the same sequences. Where nobody drafts, `n_skip`
    further rounds of the same sequences may pass before `choose` is asked again. `forget(seq)`: the
    sequence has ended.
    """

    @property
    def n_max(self) -> int: ...
    @property
    def n_max_free(self) -> int: ...
    @property
    def given_up(self) -> Mapping[str, str]: ...
    @property
    def n_skip(self) -> int: ...
    def choose(self, requests: Sequence[DraftRequest]) -> list[DraftLimit]: ...
    def record(self, feedback: RoundFeedback) -> None: ...
    def forget(self, seq: int) -> None: ...
