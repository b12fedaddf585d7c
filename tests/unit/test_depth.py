"""The depth decision: fixed and automatic, without a model."""

from __future__ import annotations

import pytest

from gguf_mtp.depth import FixedDepth
from gguf_mtp.depth.protocol import Depth, DraftRequest, DraftResult, RoundFeedback
from gguf_mtp.errors import RequestError
from gguf_mtp.types import DraftLimit


def a_round(*judged: DraftResult) -> RoundFeedback:
    return RoundFeedback(
        judged, n_rows=2, n_prefill=0, n_cells=10, target_s=1.0, draft_s=0.1, other_s=0.0
    )


def rejected(seq: int = 0) -> DraftResult:
    return DraftResult(seq, [0.9, 0.8], n_accepted=0, n_judged=1)


def test_fixed_depth_fills_each_room() -> None:
    depth: Depth = FixedDepth(3)
    rooms = [DraftRequest(0, 8), DraftRequest(5, 2), DraftRequest(2, 0)]
    assert depth.choose(rooms) == [DraftLimit(3), DraftLimit(2), DraftLimit(0)]
    assert depth.n_max == 3


def test_fixed_depth_zero_is_off() -> None:
    assert FixedDepth(0).choose([DraftRequest(0, 8)]) == [DraftLimit(0)]
    assert FixedDepth(0).n_max == 0


def test_fixed_depth_bounds_every_position_by_p_min() -> None:
    assert FixedDepth(2, p_min=0.4).choose([DraftRequest(0, 8)]) == [DraftLimit(2, (0.4, 0.4))]


@pytest.mark.parametrize(("n", "p_min"), [(-1, 0.0), (1, 1.5), (1, -0.1)])
def test_fixed_depth_refuses_nonsense(n: int, p_min: float) -> None:
    with pytest.raises(RequestError, match="but must be"):
        FixedDepth(n, p_min)


def test_watchdog_ends_drafting_after_64_drafts_without_an_acceptance() -> None:
    depth = FixedDepth(2)
    for _ in range(63):
        depth.record(a_round(rejected()))
    assert not depth.given_up
    assert depth.choose([DraftRequest(0, 8)]) == [DraftLimit(2)]
    depth.record(a_round(rejected()))
    assert "0 of 64 drafts" in depth.given_up[""]
    assert depth.choose([DraftRequest(0, 8)]) == [DraftLimit(0)]


def test_watchdog_sleeps_after_one_acceptance() -> None:
    depth = FixedDepth(2)
    depth.record(a_round(DraftResult(0, [0.9, 0.8], n_accepted=1, n_judged=2)))
    for _ in range(200):
        depth.record(a_round(rejected()))
    assert not depth.given_up


def test_watchdog_counts_only_judged_drafts() -> None:
    depth = FixedDepth(2)
    for _ in range(200):
        depth.record(a_round(DraftResult(0, [], n_accepted=0, n_judged=0)))
    assert not depth.given_up
