"""What the depth decision would tell a user: what it chose, what that gains, or why it is off."""

from __future__ import annotations

from typing import NamedTuple

from gguf_mtp.depth.plan import View


class DepthReport(NamedTuple):
    """For one sequence and its next draft.

    `plain_tokens_per_s` is what decoding without drafts would reach (None before it was measured),
    `speed_up` the expected gain over it; `acceptance[k]` of draft position k given the ones before,
    for the positions that were judged at all. `reason`, one sentence, says why `depth` is 0.
    """

    plain_tokens_per_s: float | None
    depth: int
    speed_up: float
    acceptance: tuple[float, ...]
    reason: str | None


def reason_off(mean: View, most: int) -> str:
    """Why no depth of at most `most` pays, from the estimate for one sequence."""
    depth = max(range(1, most + 1), key=lambda n: mean.rate_of((n,)), default=0)
    if depth == 0:
        return "no draft was tried yet"
    times = mean.seconds((depth,)) / mean.plain
    if 1 + depth <= times:
        return (
            f"verification too dear: drafting and checking {depth} takes {times:.2f} times as long "
            f"as a plain step, so that not even {depth} accepted of {depth} would pay"
        )
    return (
        f"acceptance too low: drafting and checking {depth} takes {times:.2f} times as long as a "
        f"plain step, but only {mean.tokens((depth,)) - 1:.2f} of {depth} would be accepted"
    )
