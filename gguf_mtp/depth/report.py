"""What the depth decision would tell a user: what it chose, what that gains, or why it is off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gguf_mtp.depth.cost_model import TargetCost
from gguf_mtp.depth.drafter_controller import DrafterController
from gguf_mtp.depth.goodput import GoodputEstimate
from gguf_mtp.depth.ngram_arbiter import NgramArbiter


class DepthReport(NamedTuple):
    """For one sequence and its next draft.

    `plain_tokens_per_s` is what decoding without drafts would reach (None before it was measured),
    `speed_up` the expected gain over it; `acceptance[k]` of draft position k given the ones before,
    for the positions that were judged at all. `reason`, one sentence, says why `depth` is 0. They
    are the leading drafter's; `free_drafts` has the acceptance of those that are free.
    """

    plain_tokens_per_s: float | None
    depth: int
    speed_up: float
    acceptance: tuple[float, ...]
    reason: str | None
    free_drafts: Mapping[str, tuple[float, ...]] = {}


def report_of(
    target: TargetCost,
    active: DrafterController | None,
    arbiter: NgramArbiter,
    given_up: Mapping[str, str],
) -> DepthReport:
    """For one sequence that goes on as the last ones did."""
    free_drafts = {name: one.by_position() for name, one in arbiter.known.items()}
    if not target.cells:
        return DepthReport(
            None, 0, 1.0, (), "plain decoding speed is still being measured", free_drafts
        )
    if active is None:
        plain = 1 / target.mean(2)[1]
        return DepthReport(plain, 0, 1.0, (), "drafting by n-gram lookup only", free_drafts)
    plan = active.outlook()
    mean = plan.mean
    judged = sum(seen > 0 for seen in active.acceptance.shared.seen)
    reason = given_up.get(active.name)
    if reason is None and active.depth == 0:
        reason = reason_off(mean, min(judged, max(target.cells) - 1))
    speed_up = plan.rate * mean.plain if active.depth else 1.0
    acceptance = tuple(mean.acceptance[0][:judged])
    return DepthReport(1 / mean.plain, active.depth, speed_up, acceptance, reason, free_drafts)


def reason_off(mean: GoodputEstimate, most: int) -> str:
    """Why no depth of at most `most` pays, from the estimate for one sequence."""
    depth = max(range(1, most + 1), key=lambda n: mean.rate_of((n,)), default=0)
    if depth == 0:
        return "no draft has been tried yet"
    times = mean.seconds((depth,)) / mean.plain
    if 1 + depth <= times:
        return (
            f"verification too expensive: drafting and verifying at depth {depth} takes "
            f"{times:.2f} times as long as a plain step, so drafting would not be faster even if "
            f"{depth} of {depth} draft tokens were accepted"
        )
    return (
        f"acceptance too low: drafting and verifying at depth {depth} takes {times:.2f} times as "
        f"long as a plain step, but only {mean.tokens((depth,)) - 1:.2f} of {depth} draft tokens "
        "are expected to be accepted"
    )
