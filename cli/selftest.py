"""Does a converted file run, and does its drafter draft? Decodes with and without it.

A block with a silent mistake (two inputs swapped, a norm forgotten) loads and runs; only nothing
that it drafts is ever accepted.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ..session import Session
    from ..stats import Stats

_N_TOKENS = 32  # of an answer, and at least of all
_N_DRAFTS = 64  # so many without one accepted are a verdict
_PROMPTS = (
    "What is the capital of France?",
    "Define water.",
    "Write the Python function sum.",
    "What is a bridge?",
    "What does the word \"slow\" mean?",
    "What is the population of Japan?",
    "Tell me a story.",
    "What is a computer?",
    "Count to twenty.",
    "What is the currency of Brazil?",
    "Define music.",
    "Why is the sky blue?",
)  # fmt: skip


class SelfTest(NamedTuple):
    """`differs_at`: the first of `n_tokens` where drafting changed the text; None: nowhere."""

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
            else f"token {self.differs_at + 1} of {self.n_tokens} differs with drafting, "
            "which near ties can cause"
        )
        return f"{same}; {self.accepted} of {self.drafted} drafts accepted"


class _Answers(NamedTuple):
    tokens: list[list[int]]
    stats: Stats


def self_test(path: Path, drafter: str | None, n_threads: int) -> SelfTest:
    """Loads `path` once or twice; `drafter` names the one that it has, in the file or beside it.
    Raises `ModelError` when it does not run."""
    if drafter is None:
        plain = _decode(path, "off", n_threads, 4)
        return SelfTest(sum(map(len, plain.tokens)), None, 0, 0)
    drafting = _decode(path, drafter, n_threads, len(_PROMPTS))
    plain = _decode(path, "off", n_threads, len(drafting.tokens))
    ours, theirs = ([t for answer in a.tokens for t in answer] for a in (drafting, plain))
    n = max(len(ours), len(theirs))
    differs_at = next((i for i in range(n) if ours[i : i + 1] != theirs[i : i + 1]), None)
    return SelfTest(len(theirs), differs_at, drafting.stats.drafted, drafting.stats.accepted)


def _decode(path: Path, draft: str, n_threads: int, n_prompts: int) -> _Answers:
    """Greedy answers, with drafting only as many as are needed to judge it."""
    from ..loading.loader import LoadOptions, load
    from ..params import SamplingParams
    from ..stats import Stats

    answers, total = list[list[int]](), Stats()
    options = LoadOptions(n_ctx=512, n_threads=n_threads, draft=draft, draft_min=1, draft_max=1)
    with load(path, options) as session:
        for prompt in _PROMPTS[:n_prompts]:
            tokens: list[int] = []
            for chunk in session.engine.generate(
                [_tokens(session, prompt)], SamplingParams(temperature=0), _N_TOKENS
            ):
                tokens += chunk.tokens
                if chunk.stats:
                    total += chunk.stats
            answers.append(tokens)
            n_tokens = sum(map(len, answers))
            if (
                draft != "off"
                and n_tokens >= _N_TOKENS
                and (total.accepted or total.drafted >= _N_DRAFTS)
            ):
                break
    return _Answers(answers, total)


def _tokens(session: Session, prompt: str) -> list[int]:
    if session.vocab.chat_template:
        return session.chat_tokens([{"role": "user", "content": prompt}])
    return session.vocab.tokenize(prompt, add_special=True)
