"""The chat template that a DeepSeek-V4 file gets: releases come with an encoder in Python instead.

The text is what models were trained on; releases differ in what `reasoning_effort` says.
"""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["chat_template"]

_FILE = Path(__file__).parent / "templates" / "deepseek_v4.jinja"
_MUCH = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to "
    "resolve the root cause, rigorously stress-testing your logic against all potential paths, "
    "edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, "
    "considered alternative, and rejected hypothesis to ensure absolutely no assumption is left "
    "unchecked.\n\n"
)
_MOST = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: "
    "exhaustively decompose the problem into its most fundamental components, trace every causal "
    "chain to its root, and resolve the underlying cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles "
    "and are certain that no assumption remains unchecked and no error remains undiscovered.\n\n"
)
_FIRST = {"max": _MUCH}
_LATER = {"high": _MUCH, "max": _MOST}
_LATER_RELEASES = ("0731", "0813")


def chat_template(name: str) -> str:
    """For a checkpoint of this name, from which releases are told apart as their files do not."""
    is_later = any(release in name for release in _LATER_RELEASES)
    efforts = json.dumps(_LATER if is_later else _FIRST, ensure_ascii=False)
    return _FILE.read_text(encoding="utf-8").replace("EFFORTS", efforts, 1)
