"""The parts of the automatic depth: costs, acceptance, plans, calibration."""

from __future__ import annotations

import random
from itertools import product

import pytest

from gguf_mtp.depth.acceptance import Acceptance
from gguf_mtp.depth.confidence import EDGES, Calibration, Table, best_cut, rate_under, rising
from gguf_mtp.depth.cost_model import DraftCost, TargetCost
from gguf_mtp.depth.goodput import StepCosts, estimate_goodput

FLAT_DRAFT = (0.1, 0.1, 0.01, 0.0)


# -- costs -------------------------------------------------------------------------------------


def test_target_times_are_those_measured_and_between_and_beyond_them() -> None:
    cost = TargetCost()
    for m, seconds in ((1, 1.0), (2, 1.5), (4, 2.5)):
        for _ in range(40):
            cost.observe(m, seconds, same_shape=True)
    mean = cost.mean(7)
    assert mean[1:5] == pytest.approx([1.0, 1.5, 2.0, 2.5], rel=0.01)
    assert 2.5 < mean[6] < 3.5  # between flat and linear
    assert all(low <= one for low, one in zip(cost.low(7)[1:], mean[1:], strict=True))


def test_a_rebuilt_graph_is_not_a_target_time_but_the_price_of_a_change() -> None:
    cost = TargetCost()
    for _ in range(30):
        cost.observe(1, 1.39, same_shape=False)
        cost.observe(1, 1.0, same_shape=True)
    assert cost.mean(2)[1] == pytest.approx(1.0, rel=0.01)
    assert cost.rebuild == pytest.approx(0.39, abs=0.06)


def test_row_counts_not_decoded_lately_drift_with_the_others() -> None:
    cost = TargetCost()
    for m, seconds in ((1, 1.0), (2, 1.5)):
        for _ in range(30):
            cost.observe(m, seconds, same_shape=True)
    for i in range(600):  # the context grows: half as dear again, and only 2 rows are decoded
        cost.observe(2, 1.5 * (1 + 0.5 * i / 600), same_shape=True)
    assert cost.mean(3)[1] == pytest.approx(1.5, rel=0.1)


def test_hiccups_hardly_move_a_time() -> None:
    cost = TargetCost()
    rng = random.Random(1)
    for i in range(200):
        cost.observe(1, 8.0 if i % 20 == 10 else 1 + rng.gauss(0, 0.02), same_shape=True)
    assert cost.mean(2)[1] == pytest.approx(1.0, rel=0.1)


def test_draft_steps_are_told_apart_from_the_first_and_from_rows() -> None:
    cost = DraftCost()
    rng = random.Random(2)
    for _ in range(400):
        steps = rng.randint(1, 6)
        tokens = steps + rng.randint(0, 3 * steps)
        cost.observe(steps, tokens, 0.05 + 0.1 * steps + 0.02 * (tokens - steps))
    first, further, row = cost.parts(1.0)
    assert (first, further, row) == pytest.approx((0.15, 0.1, 0.02), rel=0.1)


def test_a_block_has_one_price_however_long_it_is() -> None:
    cost = DraftCost(is_block=True)
    rng = random.Random(2)
    for _ in range(200):
        n = rng.randint(1, 5)
        cost.observe(n, n, 0.3)
    first, further, _ = cost.parts(1.0)
    assert first == pytest.approx(0.3, rel=0.05)
    assert further == 0
    assert DraftCost(is_block=True).parts(1.0)[1] == 0, "before anything was measured too"


# -- acceptance --------------------------------------------------------------------------------


def test_a_slow_beginning_does_not_stick() -> None:
    """Weights still on disk: the first times are many times too long."""
    cost = TargetCost()
    for seconds in [0.65, 0.41, 0.32] + [0.015] * 3:
        cost.observe(1, seconds, same_shape=True)
    assert cost.mean(2)[1] == pytest.approx(0.015, rel=0.01)


def test_a_first_time_that_was_a_hiccup_is_tried_again_and_overruled() -> None:
    cost = TargetCost()
    for _ in range(50):
        cost.observe(1, 1.0, same_shape=True)
        cost.observe(2, 1.1, same_shape=True)
    cost.observe(3, 1.35, same_shape=True)
    assert cost.low(4)[3] < 1.2  # an optimist would try
    cost.observe(3, 1.2, same_shape=True)
    assert cost.mean(4)[3] == pytest.approx(1.2, rel=0.02)


def test_a_machine_that_slows_down_takes_all_times_along() -> None:
    cost = TargetCost()
    for _ in range(50):
        cost.observe(1, 1.0, same_shape=True)
        cost.observe(4, 1.5, same_shape=True)
    for _ in range(4):
        cost.observe(1, 2.0, same_shape=True)
    assert cost.mean(5)[1] == pytest.approx(2.0, rel=0.05)
    assert cost.mean(5)[4] == pytest.approx(3.0, rel=0.05)


def test_a_draft_that_took_no_time_breaks_nothing() -> None:
    cost = DraftCost()
    for _ in range(3):
        cost.observe(1, 1, 0.0)
    assert cost.parts(1.0) == (0.0, 0.0, 0.0)


def judge(acceptance: Acceptance, seq: int, verdicts: list[float], n: int) -> None:
    for _ in range(n):
        acceptance.tick()
        acceptance.judge(seq, verdicts)


def test_only_judged_positions_are_learned() -> None:
    acceptance = Acceptance(4)
    judge(acceptance, 0, [0.0], 50)
    assert acceptance.mean(0)[0] < 0.1
    assert acceptance.shared.seen == [50, 0, 0, 0]


def test_a_new_sequence_starts_from_what_others_showed() -> None:
    acceptance = Acceptance(4)
    judge(acceptance, 0, [1.0, 0.0], 100)
    acceptance.forget(0)
    assert acceptance.mean(1)[0] > 0.95
    assert acceptance.mean(1)[1] < 0.1


def test_sequences_do_not_share_their_own_evidence() -> None:
    acceptance = Acceptance(2)
    for _ in range(60):
        judge(acceptance, 0, [1.0, 1.0], 1)
        judge(acceptance, 1, [0.0], 1)
    assert acceptance.mean(0)[0] > 0.9
    assert acceptance.mean(1)[0] < 0.15
    assert acceptance.mean(1)[1] < 0.5  # the prior of position 1 moves with position 0


def test_a_changed_text_is_noticed_within_a_few_drafts() -> None:
    acceptance = Acceptance(1)
    judge(acceptance, 0, [1.0], 150)
    judge(acceptance, 0, [0.0], 16)
    assert acceptance.mean(0)[0] < 0.5  # 0.92 by the long memory alone


def test_old_evidence_leaves_room_for_hope() -> None:
    acceptance = Acceptance(1)
    judge(acceptance, 0, [0.0], 50)
    fresh = acceptance.high(0, acceptance.mean(0))[0]
    for _ in range(400):
        acceptance.tick()
    assert fresh < 0.2
    assert acceptance.high(0, acceptance.mean(0))[0] > 0.85


# -- plan --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_growth_finds_the_best_depths_of_a_batch(seed: int) -> None:
    """Against trying everything: three sequences, up to three tokens each, any prices."""
    rng = random.Random(seed)
    acceptance = [[rng.random() for _ in range(3)] for _ in range(3)]
    target = [0.0, 0.0, 0.0, 1.0]
    while len(target) < 14:
        target.append(target[-1] + rng.choice((0.02, 0.1, 0.4)))
    mean = estimate_goodput(acceptance, [3, 2, 3], StepCosts(target, 0.1, 0.1, 0.1, 0.0), 1)
    best = max(mean.rate_of(depths) for depths in product(range(4), range(3), range(4)))
    assert max(mean.rates) == pytest.approx(best, rel=1e-9)  # rows of a step cost what steps do
    k = mean.best(8)
    assert mean.rate_of(mean.depths(k)) == pytest.approx(mean.rates[k], rel=1e-9)


def test_the_value_of_a_depth_is_expected_tokens_over_time() -> None:
    mean = estimate_goodput([[0.8, 0.5]], [2], StepCosts([0, 1.0, 1.2, 1.4], *FLAT_DRAFT), 1)
    assert mean.rates == pytest.approx([1.0, 1.8 / 1.3, 2.2 / 1.6])


def test_a_least_depth_comes_as_one_step() -> None:
    mean = estimate_goodput([[0.9] * 4, [0.1] * 2], [4, 2], StepCosts([1.0] * 9, *FLAT_DRAFT), 3)
    assert [(item.who, item.depth, item.rows) for item in mean.items] == [(0, 3, 3), (0, 4, 1)]


# -- confidence --------------------------------------------------------------------------------


def test_rising_pools_what_falls() -> None:
    assert rising([0.1, 0.5, 0.3, 0.9], [1, 1, 3, 1]) == pytest.approx([0.1, 0.35, 0.35, 0.9])


def test_calibration_learns_acceptance_by_confidence() -> None:
    calibration = Calibration(2)
    for _ in range(400):
        calibration.observe([0.95, 0.5], n_accepted=1, n_judged=2)
        calibration.observe([0.5, 0.5], n_accepted=0, n_judged=1)
    first = calibration.rates()[0]
    assert first[1] < 0.1
    assert first[4] > 0.9


def test_a_cut_draft_counts_with_what_its_bin_would_have_brought() -> None:
    calibration = Calibration(1)
    for _ in range(300):
        calibration.observe([0.5], n_accepted=0, n_judged=1)
        calibration.observe([0.95], n_accepted=1, n_judged=1)
    below = calibration.shares_below(0, EDGES[2])
    assert below[1] > 0.99
    assert sum(below) == pytest.approx(1.0)
    assert calibration.observe_cut(0, below) < 0.1


def test_a_text_is_weighed_by_its_own_confidences() -> None:
    calibration = Calibration(1)
    for _ in range(300):
        calibration.observe([0.5], n_accepted=0, n_judged=1)
        calibration.observe([0.95], n_accepted=1, n_judged=1)
    unsure = [[0.0, 90.0, 0.0, 0.0, 10.0, 0.0]]
    whole, own = calibration.table(1, 1.0), calibration.table(1, 1.0, unsure)
    assert whole.kept[0][2] == pytest.approx(0.5, abs=0.02)  # of all drafts, half reach 0.6
    assert own.kept[0][2] == pytest.approx((10 + 5) / 110, abs=0.02)  # 10 drafts' worth of all
    assert own.accepted[0][0] < 0.2 < 0.45 < whole.accepted[0][0]


def test_the_rate_under_thresholds_is_that_of_a_played_out_game() -> None:
    """Two positions, two kinds of tokens: against enumeration by hand."""
    table = Table(kept=[[1.0, 0.6], [1.0, 0.6]], accepted=[[0.7, 0.54], [0.7, 0.54]])
    prices = StepCosts([0, 1.0, 1.5, 2.0], 0.1, 0.1, 0.0, 0.0)
    tokens = 1 + 0.54 + 0.54 * 0.54
    seconds = 0.1 + 0.6 * 0.1 + 0.4 * 1.0 + 0.24 * 1.5 + 0.36 * 2.0
    changes = 1 - (0.4**2 + 0.24**2 + 0.36**2)
    expected = tokens / (seconds + 0.3 * changes)
    assert rate_under(table, [1, 1], prices, 0.3) == pytest.approx(expected)


def test_thresholds_keep_the_least_depth_open() -> None:
    table = Calibration(4).table(4, 0.5)
    cut, _ = best_cut(table, StepCosts([0] + [1.0 + m for m in range(6)], *FLAT_DRAFT), 0.0, 3)
    assert cut[1:3] == [0, 0]
    assert len(cut) >= 3
