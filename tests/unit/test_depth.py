"""The depth decision: fixed and automatic, without a model."""

from __future__ import annotations

import pytest

from gguf_mtp.depth import FixedDepth
from gguf_mtp.depth.protocol import Depth, Judged, Room, Round
from gguf_mtp.errors import RequestError
from gguf_mtp.types import Limit


def a_round(*judged: Judged) -> Round:
    return Round(judged, n_rows=2, n_prefill=0, n_cells=10, target_s=1.0, draft_s=0.1, other_s=0.0)


def rejected(seq: int = 0) -> Judged:
    return Judged(seq, [0.9, 0.8], n_accepted=0, n_judged=1)


def test_fixed_depth_fills_each_room() -> None:
    depth: Depth = FixedDepth(3)
    rooms = [Room(0, 8), Room(5, 2), Room(2, 0)]
    assert depth.choose(rooms) == [Limit(3), Limit(2), Limit(0)]
    assert depth.n_max == 3


def test_fixed_depth_zero_is_off() -> None:
    assert FixedDepth(0).choose([Room(0, 8)]) == [Limit(0)]
    assert FixedDepth(0).n_max == 0


def test_fixed_depth_bounds_every_position_by_p_min() -> None:
    assert FixedDepth(2, p_min=0.4).choose([Room(0, 8)]) == [Limit(2, (0.4, 0.4))]


@pytest.mark.parametrize(("n", "p_min"), [(-1, 0.0), (1, 1.5), (1, -0.1)])
def test_fixed_depth_refuses_nonsense(n: int, p_min: float) -> None:
    with pytest.raises(RequestError, match="but must be"):
        FixedDepth(n, p_min)


def test_watchdog_ends_drafting_after_64_drafts_without_an_acceptance() -> None:
    depth = FixedDepth(2)
    for _ in range(63):
        depth.record(a_round(rejected()))
    assert not depth.given_up
    assert depth.choose([Room(0, 8)]) == [Limit(2)]
    depth.record(a_round(rejected()))
    assert "0 of 64 drafts" in depth.given_up[""]
    assert depth.choose([Room(0, 8)]) == [Limit(0)]


def test_watchdog_sleeps_after_one_acceptance() -> None:
    depth = FixedDepth(2)
    depth.record(a_round(Judged(0, [0.9, 0.8], n_accepted=1, n_judged=2)))
    for _ in range(200):
        depth.record(a_round(rejected()))
    assert not depth.given_up


def test_watchdog_counts_only_judged_drafts() -> None:
    depth = FixedDepth(2)
    for _ in range(200):
        depth.record(a_round(Judged(0, [], n_accepted=0, n_judged=0)))
    assert not depth.given_up
