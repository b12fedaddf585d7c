"""A request's record as a line that a person reads, instead of JSON."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

__all__ = ["as_text"]


def as_text(record: Mapping[str, Any]) -> str:
    """`14:02:11 POST /v1/completions 200 in 1.25 s: 120 prompt tokens (80 cached), ...`, in this
    machine's time; what the client was told instead of an answer is said in full."""
    when = datetime.fromisoformat(str(record["time"]).replace("Z", "+00:00")).astimezone()
    head = (
        f"{when:%H:%M:%S} {record['method']} {record['path']} {record['status']} "
        f"in {record['seconds']:.2f} s"
    )
    parts = [*_answer(record), *_drafts(record)]
    if "error" in record:
        parts.append(f"error: {record['error']}")
    return f"{head}: {', '.join(parts)}" if parts else head


def _answer(record: Mapping[str, Any]) -> list[str]:
    if "answer_tokens" not in record:
        return []
    first = record["first_token_s"]
    return [
        f"{record['prompt_tokens']} prompt tokens ({record['cached_tokens']} cached)",
        *([] if first is None else [f"first token after {first:.2f} s"]),
        f"{record['answer_tokens']} tokens",
        *([f"{record['tokens_per_s']:.1f} tokens/s"] if record["tokens_per_s"] else []),
        "ended by " + " and ".join(map(str, dict.fromkeys(record["finish"]))),
    ]


def _drafts(record: Mapping[str, Any]) -> list[str]:
    """Only where something was drafted."""
    n = record.get("drafted")
    if not n:
        return []
    share = 100 * record["accepted"] / n
    found = [f"accepted {record['accepted']} of {n} drafted ({share:.0f} %)"]
    if record["rounds"]:
        found.append(f"{record['answer_tokens'] / record['rounds']:.2f} tokens per round")
    return found
