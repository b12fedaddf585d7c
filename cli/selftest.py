"""Does a converted file run, and does its MTP block draft? Decodes with and without it.

A block with a silent mistake (two inputs swapped, a norm forgotten) loads and runs; only nothing
that it drafts is ever accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from ..stats import Stats

_N_TOKENS = 32
_N_DRAFTS = 64
_PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time",
    "Water boils when",
    "The first law of motion says that",
    "To make bread you need",
)


class SelfTest(NamedTuple):
    """`differs_at` is the first of `n_tokens` where drafting changed the text, None when nowhere."""

    n_tokens: int
    differs_at: int | None
    drafted: int
    accepted: int

    @property
    def is_broken(self) -> bool:
        return self.drafted >= _N_DRAFTS and self.accepted == 0

    @property
    def sentence(self) -> str:
        if not self.drafted:
            return f"{self.n_tokens} tokens decoded, no drafting"
        same = (
            f"{self.n_tokens} tokens equal with and without drafting"
            if self.differs_at is None
            # Two rows in one batch go through other kernels than one; quantised weights show it.
            else f"token {self.differs_at} of {self.n_tokens} differs with drafting, as near ties may"
        )
        return f"{same}; {self.accepted} of {self.drafted} drafts accepted"


def self_test(path: Path, has_mtp: bool, n_threads: int) -> SelfTest:
    """Loads `path` once or twice. Raises `ModelError` when it does not run."""
    plain, _ = _decode(path, "off", n_threads, 1)
    if not has_mtp:
        return SelfTest(len(plain), None, 0, 0)
    drafting, stats = _decode(path, "mtp", n_threads, len(_PROMPTS))
    pairs = zip(plain, drafting, strict=False)
    differs_at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    return SelfTest(len(plain), differs_at, stats.drafted, stats.accepted)


def _decode(
    path: Path, draft: Literal["off", "mtp"], n_threads: int, n_prompts: int
) -> tuple[Sequence[int], Stats]:
    """The first prompt's tokens; further prompts only until enough was drafted to judge."""
    from ..loader import LoadOptions, load
    from ..stats import Stats
    from ..types import SamplingParams

    total, answers = Stats(), []
    options = LoadOptions(n_ctx=512, n_threads=n_threads, draft=draft, draft_min=1, draft_max=1)
    with load(path, options) as session:
        for prompt in _PROMPTS[:n_prompts]:
            tokens = session.vocab.tokenize(prompt, add_special=True)
            answer: list[int] = []
            for chunk in session.engine.generate(
                [tokens], SamplingParams(temperature=0), _N_TOKENS
            ):
                answer += chunk.tokens
                if chunk.stats:
                    total += chunk.stats
            answers.append(answer)
            if total.accepted or total.drafted >= _N_DRAFTS:
                break
    return answers[0], total
