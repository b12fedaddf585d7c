"""What is asked of a model when it is measured: prompts by kind, never trained on.

Definitions, facts and code are questions in the model's chat template. Repetition quotes a passage
over and over, so that a drafter can copy; random text is noise, where drafting can only lose.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..session import Session

NAMES = ("definitions", "facts", "code", "repetition", "random")
_PROMPTS = Path(__file__).parent / "prompts" / "held_out_by_kind.json"


class Asked(NamedTuple):
    """A prompt's token ids, and those of an answer that was recorded (`replay`), if any."""

    prompt: Sequence[int]
    answer: Sequence[int] | None = None


class Workload(NamedTuple):
    """What is asked; round r of a measurement takes `of_round(r, n)`."""

    name: str
    asked: Sequence[Asked]

    @property
    def prompts(self) -> list[Sequence[int]]:
        return [one.prompt for one in self.asked]

    def of_round(self, index: int, n: int) -> list[Asked]:
        """`n` prompts, other ones in every round until all were asked."""
        return [self.asked[(index * n + i) % len(self.asked)] for i in range(n)]


def questions_by_kind() -> dict[str, list[str]]:
    """Definitions, facts and code, as people ask for them."""
    kinds: dict[str, list[str]] = json.loads(_PROMPTS.read_text(encoding="utf-8"))
    return kinds


def workload(name: str, session: Session, seed: int = 0) -> Workload:
    """The workload `name` in the tokens of `session`'s model. Raises `KeyError` if unknown."""
    kinds = questions_by_kind()
    rng = random.Random(seed)
    if name == "repetition":
        prompts = [_quoted(session, rng.sample(kinds["facts"], 3)) for _ in range(30)]
    elif name == "random":
        prompts = [_noise(session, rng) for _ in range(30)]
    else:
        prompts = [session.chat_tokens([{"role": "user", "content": q}]) for q in kinds[name]]
    return Workload(name, list(map(Asked, prompts)))


def _quoted(session: Session, lines: Sequence[str]) -> list[int]:
    """A passage three times, and the beginning of a fourth."""
    passage = "".join(f"{line}\n" for line in lines)
    return session.vocab.tokenize(3 * passage + lines[0][:8], add_special=True)


def _noise(session: Session, rng: random.Random) -> list[int]:
    n_vocab = session.facts.n_vocab
    ends = session.engine.limits.end_tokens
    noise = [t for t in (rng.randrange(n_vocab) for _ in range(48)) if t not in ends]
    return [*session.vocab.tokenize("", add_special=True), *noise]
