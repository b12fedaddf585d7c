"""What `gguf-mtp bench` measures by default, and what it concludes from the figures."""

from __future__ import annotations

import pytest

from gguf_mtp.bench.run import AUTO, PLAIN, BenchCell, automatic, fixed
from gguf_mtp.bench.verdict import verdict
from gguf_mtp.cli.bench import MeasureArgs
from gguf_mtp.stats import Stats


def cell(workload: str, way: str, *seconds: float, **counts: float) -> BenchCell:
    """Rounds of 101 tokens, of which the first belongs to the prompt."""
    rounds = [
        Stats(decode_tokens=101, first_tokens=1, decode_s=s, rounds=101, **counts)  # type: ignore[arg-type]
        for s in seconds
    ]
    return BenchCell(workload, 0.0, way, rounds)


def test_quick_is_the_default_and_single_sizes_replace_its_own() -> None:
    assert MeasureArgs().sizes() == ("facts,code,repetition", "0", "1,3", 2, 2, 32)
    assert MeasureArgs(rounds=7, temps="1").sizes() == (
        "facts,code,repetition",
        "1",
        "1,3",
        7,
        2,
        32,
    )
    full = MeasureArgs(full=True, max_tokens=8).sizes()
    assert full.workloads == "definitions,facts,code,repetition,random"
    assert (full.temps, full.depths, full.rounds, full.max_tokens) == ("0,0.7,1", "1,2,3,4", 5, 8)


def test_the_verdict_gives_the_gain_by_workload_and_why() -> None:
    """Depth 1 here: 101 rounds less the first made 100 tokens in plain's 100 steps of 10 ms."""
    cells = [
        cell("facts", PLAIN.name, 1.0, 1.0, 1.0),
        cell("code", PLAIN.name, 1.0, 1.0, 1.0),
        BenchCell(
            "facts",
            0.0,
            fixed(1).name,
            [Stats(decode_tokens=101, first_tokens=1, decode_s=0.9, draft_s=0.15, rounds=61)],
        ),
        cell("facts", AUTO.name, 0.5, 0.8, 2.0),
        cell("code", AUTO.name, 1.0, 1.25, 1.25),
    ]
    gains, why = verdict(cells)
    assert gains == (
        "With automatic drafting the speed, relative to plain decoding, is 1.25 on facts and 0.80 "
        "on code."
    )
    assert why == (
        "A round that drafts one token takes 1.50 plain steps (0.25 of them to draft) and yields "
        "1.67 tokens: drafting pays where the second number is the larger."
    )


def test_sets_of_drafters_have_a_sentence_each_and_no_depth_no_reason() -> None:
    copies, both = automatic("ngram").name, automatic("ngram,mtp").name
    cells = [
        cell("code", PLAIN.name, 1.0),
        cell("code", copies, 0.5),
        cell("code", both, 0.25),
    ]
    assert verdict(cells) == [
        "With drafts of ngram the speed, relative to plain decoding, is 2.00 on code.",
        "With drafts of ngram,mtp the speed, relative to plain decoding, is 4.00 on code.",
    ]


@pytest.mark.parametrize("full", [False, True])
def test_help_names_the_most_tokens_there_are(full: bool) -> None:
    from gguf_mtp.bench.run import BenchPlan

    sizes = MeasureArgs(full=full).sizes()
    plan = BenchPlan(
        ways=(PLAIN, *MeasureArgs(full=full).ways()),
        workloads=sizes.workloads.split(","),
        temperatures=[float(t) for t in sizes.temps.split(",")],
        n_rounds=sizes.rounds,
        n_prompts=sizes.prompts,
        n_tokens=sizes.max_tokens,
    )
    assert plan.most_tokens == (69_120 if full else 2_304)
