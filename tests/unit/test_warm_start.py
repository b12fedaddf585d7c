"""The automatic depth from outside: bounds, what is recorded, its report and its stored state."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from gguf_mtp.depth import AutoDepth, DepthOptions, FixedDepth, depth_for
from gguf_mtp.depth.protocol import DraftRequest, DraftResult, RoundFeedback
from gguf_mtp.depth.warm_start import export_state, import_state
from gguf_mtp.errors import RequestError
from tests.support.depth_sim import curve, falling, simulate


def test_equal_bounds_are_a_fixed_depth_and_others_automatic() -> None:
    assert isinstance(depth_for(DepthOptions(draft_min=3, draft_max=3)), FixedDepth)
    assert isinstance(depth_for(DepthOptions(draft_max=0)), FixedDepth)
    assert isinstance(depth_for(DepthOptions(draft_max=1)), AutoDepth)


@pytest.mark.parametrize(
    "bad", [{"draft_max": -1}, {"draft_min": 9}, {"draft_min": -1}, {"draft_p_min": 1.01}]
)
def test_options_refuse_nonsense(bad: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="but must be"):
        DepthOptions(**bad)


def test_bounds_hold_in_every_round() -> None:
    depth = AutoDepth(DepthOptions(draft_min=2, draft_max=4, draft_p_min=0.3))
    world, profile = curve("flat", lambda m: 1 + 0.02 * m), falling(0.9, 0.95)
    trace = simulate(depth, world, lambda _: profile, 200, (0.1, 1))
    assert set(trace.depths) <= {0, 2, 3, 4}
    assert max(trace.depths) == 4
    limit = depth.choose([DraftRequest(0, 8)])[0]
    assert len(limit.p_min) == limit.n
    assert all(p >= 0.3 for p in limit.p_min)
    assert depth.choose([DraftRequest(0, 1)])[0].n == 0
    assert depth.choose([DraftRequest(0, 0)])[0].n == 0


def test_times_next_to_a_prompt_are_not_recorded() -> None:
    depth = AutoDepth()
    one = DraftResult(0, [], 0, 0)
    for n_prefill in (64, 0, 64, 0):
        depth.choose([DraftRequest(0, 8)])
        depth.record(RoundFeedback([one], 1, n_prefill, 10, 1.0, 0.0, 0.0))
    assert depth.target.cells == {}
    depth.record(RoundFeedback([one], 1, 0, 10, 1.0, 0.0, 0.0))
    assert depth.target.cells[1].n == 1
    depth.forget(0)  # the next request reads a prompt first
    depth.record(RoundFeedback([one], 1, 0, 10, 1.0, 0.0, 0.0))
    assert depth.target.cells[1].n == 1


def test_a_head_that_never_fits_is_given_up() -> None:
    depth = AutoDepth()
    for i in range(64):
        assert not depth.given_up, i
        depth.choose([DraftRequest(0, 8)])
        depth.record(RoundFeedback([DraftResult(0, [0.9], 0, 1)], 2, 0, 10, 1.0, 0.1, 0.0))
    assert depth.choose([DraftRequest(0, 8)])[0].n == 0
    assert depth.report().reason == depth.given_up[""]


def learned(world_law: Any, first: float) -> AutoDepth:
    depth = AutoDepth()
    simulate(depth, curve("", world_law), lambda _: falling(first, 0.9), 500, (0.02, 1))
    return depth


def test_report_names_the_gain_or_the_reason() -> None:
    assert AutoDepth().report().plain_tokens_per_s is None
    good = learned(lambda m: 1 + 0.05 * m, 0.9).report()
    assert good.plain_tokens_per_s == pytest.approx(1 / 1.05, rel=0.05)
    assert good.depth >= 1
    assert good.reason is None
    assert 1.3 < good.speed_up < 3
    assert good.acceptance[0] == pytest.approx(0.9, abs=0.06)
    low = learned(lambda m: 1 + 0.05 * m, 0.02).report()
    assert low.depth == 0
    assert low.reason
    assert "acceptance too low" in low.reason
    dear = learned(lambda m: 1 + 2.0 * (m - 1), 0.9).report()
    assert dear.depth == 0
    assert dear.reason
    assert "verification too expensive" in dear.reason


def test_a_stored_state_saves_the_search() -> None:
    before = learned(lambda m: 1 + 0.05 * m, 0.9)
    after = AutoDepth()
    assert import_state(after, json.loads(json.dumps(export_state(before)))) is None
    first = after.choose([DraftRequest(0, 8)])[0].n
    assert first > 0
    assert abs(first - before.report().depth) <= 1  # neighbours are about equal here
    assert after.report().plain_tokens_per_s == pytest.approx(1 / 1.05, rel=0.1)


def test_a_state_from_other_bounds_is_usable() -> None:
    after = AutoDepth(DepthOptions(draft_max=2))
    assert import_state(after, export_state(learned(lambda m: 1 + 0.05 * m, 0.9))) is None
    assert after.choose([DraftRequest(0, 8)])[0].n == 2


def test_damaged_states_are_refused_and_change_nothing() -> None:
    good = export_state(learned(lambda m: 1 + 0.05 * m, 0.9))
    assert good
    damaged: list[object] = [None, [], {}, {**good, "version": 99}]
    for key in good:
        damaged += [{k: v for k, v in good.items() if k != key}]
        damaged += [{**good, key: bad} for bad in ("x", -7.0, math.nan, [1], {"1": "x"})]
    drafter = good["drafters"][""]
    for key in drafter:
        for bad in ("x", -7.0, math.nan, [1], {"1": "x"}, [[5.0] * 8, [1.0] * 8]):
            damaged.append({**good, "drafters": {"": {**drafter, key: bad}}})
        some = {k: v for k, v in drafter.items() if k != key}
        damaged.append({**good, "drafters": {"": some}})
    for state in damaged:
        depth = AutoDepth()
        reason = import_state(depth, state)
        assert reason, state
        assert reason.startswith("the stored depth state is not usable")
        assert depth.target.cells == {}
    assert export_state(AutoDepth()) is None
