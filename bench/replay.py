"""Recorded answers as what the model says: real costs, and the real acceptance of every drafter.

The target decodes as always, but its choice is the recorded token. Drafters see nothing of that:
they draft from the model's own rows and from the text. So what drafting gains on one's own
conversations can be measured on any model, whether it would have answered so or not.

A file has a line of JSON for each answer: `messages`, the last of which is the answer, and a `name`
if it is not to be called after the file. Lines of one name make one workload.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import RequestError
from ..params import SamplingParams
from ..sampling.chain import SamplingChain
from ..sampling.filters import CERTAIN
from ..session import Session
from ..types import Distribution, Floats
from .workloads import Asked, Workload

__all__ = ["RECORDED", "RecordedChain", "Recording", "read_recordings", "replayed"]

RECORDED = Path(__file__).parent / "prompts" / "replay.jsonl"
"""Of this project: a file written again with two changes, a summary with quotations, and prose."""


class Recording(NamedTuple):
    name: str
    messages: Sequence[Mapping[str, Any]]

    @property
    def answer(self) -> str:
        return str(self.messages[-1]["content"])


class RecordedChain(SamplingChain):
    """A greedy chain whose target says `answer`, which ends with an end token."""

    def __init__(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        super().__init__(SamplingParams(temperature=0), prompt)
        self._first, self._answer = len(prompt), answer

    def target_probs(self, logits: Floats, after: Sequence[int] = ()) -> Distribution:
        """The recorded token; the model's own choice is made too, so that its time counts."""
        super().target_probs(logits, after)
        at = min(self._n - self._first + len(after), len(self._answer) - 1)
        return Distribution(np.array([self._answer[at]]), CERTAIN)


def read_recordings(path: Path) -> list[Recording]:
    """Raises `RequestError` with the line that is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read {path}: {error}") from None
    found = list(_recordings(path, lines))
    if not found:
        raise RequestError(f"{path} holds no recorded answer")
    return found


def _recordings(path: Path, lines: Sequence[str]) -> Iterator[Recording]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            whole = json.loads(line)
            messages = whole["messages"]
            is_answer = messages[-1]["role"] == "assistant" and messages[-1]["content"]
            name = str(whole.get("name", path.stem))
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            is_answer = False
        if not is_answer:
            raise RequestError(
                f"{path}, line {number}: must be an object with `messages`, the last of which is "
                "the assistant's answer"
            )
        yield Recording(name, messages)


def replayed(recordings: Sequence[Recording], session: Session) -> list[Workload]:
    """The recordings in the tokens of `session`'s model, by name."""
    found: dict[str, list[Asked]] = {}
    end = min(session.engine.limits.end_tokens)
    for one in recordings:
        prompt = session.chat_tokens(one.messages[:-1])
        answer = session.vocab.tokenize(one.answer, add_special=False, parse_special=False)
        found.setdefault(one.name, []).append(Asked(prompt, [*answer, end]))
    return [Workload(name, asked) for name, asked in found.items()]
