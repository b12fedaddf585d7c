"""What is said about an answer's speed and drafts: plain strings and plain values, no terminal."""

from __future__ import annotations

from typing import Any

from ..depth import AutoDepth, DepthReport
from ..depth.protocol import Depth
from ..stats import Stats


def timings(stats: Stats) -> dict[str, Any]:
    """The `timings` object of `run --json`; times in seconds."""
    return {
        "prefill_tokens": stats.prefill_tokens,
        "cached_tokens": stats.cached_tokens,
        "prefill_s": round(stats.prefill_s, 6),
        "decode_tokens": stats.decode_tokens,
        "first_tokens": stats.first_tokens,
        "decode_s": round(stats.decode_s, 6),
        "tokens_per_s": round(stats.tokens_per_s, 2),
        "target_s": round(stats.target_s, 6),
        "draft_s": round(stats.draft_s, 6),
    }


def drafting(stats: Stats) -> dict[str, Any]:
    """The `draft` object of `run --json`. Position k counts drafts whose k-th token was judged."""
    return {
        "rounds": stats.rounds,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "acceptance_rate": round(stats.acceptance_rate, 4),
        "judged_per_position": stats.judged_per_position,
        "accepted_per_position": stats.accepted_per_position,
        "rounds_per_depth": stats.rounds_per_depth,
        "tokens_per_round": round(stats.tokens_per_round, 3),
        "by_drafter": {
            name: {"drafts": n, "drafted": drafted, "accepted": accepted}
            for name, (n, drafted, accepted) in stats.by_drafter.items()
        },
    }


def lines(stats: Stats) -> list[str]:
    """The same for people: speed, then acceptance when something was drafted."""
    out = [
        f"prompt  {stats.prefill_tokens} tokens read at "
        f"{_ratio(stats.prefill_tokens, stats.prefill_s):.1f} tokens/s, "
        f"{stats.cached_tokens} already in the cache",
        f"answer  {stats.decode_tokens} tokens in {stats.decode_s:.2f} s, "
        f"{stats.tokens_per_s:.1f} tokens/s",
    ]
    if stats.drafted:
        out += [
            f"drafts  accepted {stats.accepted} / drafted {stats.drafted} = "
            f"{100 * stats.acceptance_rate:.0f} %, "
            f"{stats.tokens_per_round:.2f} tokens per round",
            f"        by position {by_position(stats)}",
        ]
        if len(stats.by_drafter) > 1:
            out.append(f"        by drafter {by_drafter(stats)}")
    return out


def answer_line(stats: Stats, depth: Depth) -> str:
    """One line under an answer: speed, acceptance, and what the depth decision makes of it."""
    parts = [f"{stats.decode_tokens} tokens, {stats.tokens_per_s:.1f} tokens/s"]
    if stats.drafted:
        parts.append(
            f"accepted {stats.accepted} / drafted {stats.drafted} = "
            f"{100 * stats.acceptance_rate:.0f} %, {stats.tokens_per_round:.2f} tokens per round"
        )
    if isinstance(depth, AutoDepth):
        parts.append(_decision(depth.report()))
    return "; ".join(parts)


def decision_lines(depth: Depth) -> list[str]:
    """The state of an automatic depth; nothing for a fixed one."""
    if not isinstance(depth, AutoDepth):
        return []
    report = depth.report()
    out = [f"depth   {_decision(report)}"]
    if report.depth == 0 and report.reason:
        tip = "; --draft off saves the drafter's memory" if report.acceptance else ""
        out.append(f"        {report.reason}{tip}")
    for rates in report.free_drafts.values():
        if rates:
            out.append(f"        copies with a correct first token: {100 * rates[0]:.0f} %")
    return out


def _decision(report: DepthReport) -> str:
    """ "depth 2, plain decoding would be 41.0 tokens/s, speed-up 1.32 x"."""
    if report.plain_tokens_per_s is None:
        return "depth not decided yet"
    speed_up = f", speed-up {report.speed_up:.2f} x" if report.depth else ""
    return (
        f"depth {report.depth}, plain decoding would be "
        f"{report.plain_tokens_per_s:.1f} tokens/s{speed_up}"
    )


def by_drafter(stats: Stats) -> str:
    """Accepted of drafted tokens, by name: "ngram 31/34, mtp 12/20"."""
    return ", ".join(
        f"{name} {accepted}/{drafted}" for name, (_, drafted, accepted) in stats.by_drafter.items()
    )


def by_position(stats: Stats) -> str:
    """Acceptance of each draft position among those judged: "80 % 77 %"."""
    return " ".join(
        f"{100 * accepted / judged:.0f} %"
        for accepted, judged in zip(
            [*stats.accepted_per_position, *[0] * len(stats.judged_per_position)],
            stats.judged_per_position,
            strict=False,
        )
    )


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0
