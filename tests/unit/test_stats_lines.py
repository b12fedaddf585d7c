"""What is said about an answer."""

from __future__ import annotations

from dataclasses import replace

from gguf_mtp.cli import stats_lines
from gguf_mtp.depth import AutoDepth, DepthOptions, FixedDepth
from gguf_mtp.depth.protocol import DraftRequest, DraftResult, RoundFeedback
from gguf_mtp.stats import Stats

STATS = Stats(
    prefill_tokens=10,
    cached_tokens=4,
    prefill_s=0.5,
    decode_tokens=30,
    decode_s=2.0,
    target_s=1.5,
    draft_s=0.25,
    rounds=12,
    drafted=24,
    judged_per_position=[12, 9],
    accepted_per_position=[9],
    rounds_per_depth=[0, 0, 12],
    by_drafter={"ngram": [4, 8, 3], "mtp": [8, 16, 6]},
)


def test_values_for_machines() -> None:
    assert stats_lines.timings(STATS) == {
        "prefill_tokens": 10,
        "cached_tokens": 4,
        "prefill_s": 0.5,
        "decode_tokens": 30,
        "first_tokens": 0,
        "decode_s": 2.0,
        "tokens_per_s": 15.0,
        "target_s": 1.5,
        "draft_s": 0.25,
    }
    assert stats_lines.drafting(STATS) == {
        "rounds": 12,
        "drafted": 24,
        "accepted": 9,
        "acceptance_rate": 0.375,
        "judged_per_position": [12, 9],
        "accepted_per_position": [9],
        "rounds_per_depth": [0, 0, 12],
        "tokens_per_round": 2.5,
        "by_drafter": {
            "ngram": {"drafts": 4, "drafted": 8, "accepted": 3},
            "mtp": {"drafts": 8, "drafted": 16, "accepted": 6},
        },
    }


def test_a_position_where_nothing_was_accepted_counts_as_zero() -> None:
    assert stats_lines.by_position(STATS) == "75 % 0 %"


def test_several_drafters_are_counted_apart() -> None:
    assert "        by drafter ngram 3/8, mtp 6/16" in stats_lines.lines(STATS)
    alone = replace(STATS, by_drafter={"mtp": [12, 24, 9]})
    assert not any("by drafter" in line for line in stats_lines.lines(alone))


def test_nothing_is_divided_by_nothing() -> None:
    assert stats_lines.timings(Stats())["tokens_per_s"] == 0.0
    assert stats_lines.drafting(Stats())["acceptance_rate"] == 0.0
    assert stats_lines.lines(Stats())


def test_the_line_under_an_answer() -> None:
    assert stats_lines.answer_line(STATS, FixedDepth(2)) == (
        "30 tokens, 15.0 tokens/s; accepted 9 / drafted 24 = 38 %, 2.50 tokens per round"
    )
    depth = AutoDepth(DepthOptions(draft_max=2))
    assert stats_lines.answer_line(STATS, depth).endswith("depth not decided yet")


def run(depth: AutoDepth, target_s: dict[int, float], every: int) -> None:
    """200 rounds; in one out of `every`, all that was drafted is accepted, else nothing."""
    for i in range(200):
        [limit] = depth.choose([DraftRequest(0, 8)])
        n_accepted = limit.n if i % every == 0 else 0
        judged = DraftResult(0, [0.9] * limit.n, n_accepted, min(n_accepted + 1, limit.n))
        depth.record(
            RoundFeedback([judged], 1 + limit.n, 0, 50, target_s[1 + limit.n], 0.001 * limit.n, 0)
        )


def test_the_decision_names_speed_gain_or_the_reason_against() -> None:
    cheap = AutoDepth(DepthOptions(draft_max=2))
    run(cheap, {1: 0.1, 2: 0.105, 3: 0.11}, every=1)
    [line] = stats_lines.decision_lines(cheap)
    assert line.startswith("depth   depth 2, plain decoding would be 10.0 tokens/s, speed-up 2.")

    dear = AutoDepth(DepthOptions(draft_max=2))
    run(dear, {1: 0.1, 2: 0.3, 3: 0.4}, every=1)
    line, reason = stats_lines.decision_lines(dear)
    assert line == "depth   depth 0, plain decoding would be 10.0 tokens/s"
    assert "verification too expensive" in reason

    copies = AutoDepth(DepthOptions(draft_max=2))
    for n_accepted in (1, 0, 0, 1) * 10:
        offers = [DraftResult(0, [0.5], n_accepted, 1, "ngram")]
        copies.record(RoundFeedback([], 1, 0, 50, 0.1, 0.0, 0.0, offers))
    assert stats_lines.decision_lines(copies)[1:] == [
        "        drafting by n-gram lookup only",
        "        copies with a correct first token: 50 %",
    ]

    wrong = AutoDepth(DepthOptions(draft_max=2))
    run(wrong, {1: 0.1, 2: 0.13, 3: 0.16}, every=10)
    assert "acceptance too low" in stats_lines.decision_lines(wrong)[1]
