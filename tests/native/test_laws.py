"""The laws on the demo model through real llama.cpp: whatever is drafted, the text is the target's.

Strict settings (F32 weights and cache, no flash attention, one thread) admit no tolerance. On
product settings a decode of several rows differs from several decodes of one by the kernels'
batch-shape noise; there every drafted text is replayed and held to that noise.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from gguf_mtp.demo import demo_model
from gguf_mtp.engine import request
from gguf_mtp.engine.engine import Engine
from gguf_mtp.loading.loader import LoadOptions, load
from gguf_mtp.params import SamplingParams
from gguf_mtp.sampling.verify import verify
from gguf_mtp.session import Session
from gguf_mtp.stats import Stats
from gguf_mtp.types import Decoder, Draft, Floats, Rows, Step, Verdict

pytestmark = pytest.mark.native

GREEDY = SamplingParams(temperature=0)
N_PROMPTS, N_TOKENS = 50, 100
PROMPTS = json.loads(Path("bench/prompts/held_out.json").read_text(encoding="utf-8"))


def strict(depth: int) -> Session:
    options = LoadOptions(n_ctx=512, draft_min=depth, draft_max=depth, strict=True)
    return load(demo_model(kind="f32"), options)


def product(depth: int) -> Session:
    options = LoadOptions(n_ctx=512, n_threads=2, draft_min=depth, draft_max=depth)
    return load(demo_model(kind="q8_0"), options)


def prompts(session: Session, n: int = N_PROMPTS) -> list[list[int]]:
    return [session.chat_tokens([{"role": "user", "content": p}]) for p in PROMPTS[:n]]


def answers(session: Session, n: int = N_PROMPTS) -> tuple[list[list[int]], Stats]:
    texts, total = [], Stats()
    for prompt in prompts(session, n):
        tokens: list[int] = []
        for chunk in session.engine.generate([prompt], GREEDY, N_TOKENS):
            tokens += chunk.tokens
        assert chunk.stats is not None
        total += chunk.stats
        texts.append(tokens)
    return texts, total


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    with strict(0) as session:
        return answers(session)[0]


@pytest.mark.parametrize("depth", range(1, 7))
def test_strict_text_is_the_same_at_every_depth(depth: int, plain: list[list[int]]) -> None:
    with strict(depth) as session:
        texts, total = answers(session)
    assert texts == plain
    assert total.accepted > total.rounds / 2  # drafts were made, and many were right


class Dirty:
    """A decoder that leaves one rejected row in the cache: later rows attend to it."""

    def __init__(self, inner: Decoder) -> None:
        self._inner, self._left = inner, 0

    def n_past(self, seq: int) -> int:
        return self._inner.n_past(seq) - self._left

    def decode(self, rows: Sequence[Rows]) -> Step:
        return self._inner.decode(
            [Rows(r.seq, r.pos + self._left, r.tokens, r.n_outputs, r.hidden) for r in rows]
        )

    def rewind(self, seq: int, n_past: int) -> None:
        if n_past == 0:
            self._left = 0
            return self._inner.rewind(seq, 0)
        if n_past < self.n_past(seq):
            self._left += 1
        return self._inner.rewind(seq, n_past + self._left)

    def copy(self, src: int, dst: int, n_past: int) -> None:
        raise NotImplementedError


def test_mutant_that_leaves_a_rejected_row_is_caught(plain: list[list[int]]) -> None:
    with strict(2) as session:
        engine = session.engine
        engine._target = engine._slots._target = Dirty(engine._target)
        texts, _ = answers(session, 10)
    assert texts != plain[:10]


def trusting(draft: Draft, target, chain) -> Verdict:  # type: ignore[no-untyped-def]
    """A verifier that takes the first draft token unseen."""
    n, token = verify(draft, target, chain)
    if n == 0 and draft.tokens:
        return Verdict(1, chain.draw(target(1)))
    return Verdict(n, token)


def test_mutant_that_trusts_the_drafter_is_caught(
    plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request, "verify", trusting)
    with strict(2) as session:
        texts, _ = answers(session, 10)
    assert texts != plain[:10]


# -- product settings --------------------------------------------------------------------------


def rows_of(session: Session, tokens: Sequence[int], m: int) -> Floats:
    """The target's logits after each prefix of `tokens`, decoded `m` rows at a time."""
    target: Decoder = session.engine._target
    target.rewind(0, 0)
    rows = []
    for i in range(0, len(tokens), m):
        piece = tokens[i : i + m]
        rows.append(target.decode([Rows(0, i, piece, len(piece))]).outputs[0].logits.copy())
    target.rewind(0, 0)
    return np.concatenate(rows)


def batch_shape_noise(session: Session, texts: Sequence[Sequence[int]], m: int) -> float:
    """The largest logit difference between decodes of one row and of `m`."""
    return max(
        float(np.abs(rows_of(session, text, 1) - rows_of(session, text, m)).max()) for text in texts
    )


def replay(session: Session, prompt: list[int], answer: list[int]) -> list[float]:
    """How far each answer token's logit lies below its row's maximum, decoded one row at a time."""
    rows = rows_of(session, [*prompt, *answer[:-1]], 1)[len(prompt) - 1 :]
    return [float(row.max() - row[t]) for row, t in zip(rows, answer, strict=True)]


def below_the_maximum(depth: int, n: int) -> tuple[np.ndarray, float]:
    """Every answer token's distance from its row's maximum, and the noise to hold it against."""
    with product(depth) as session:
        texts = answers(session, n)[0]
        gaps = [
            gap
            for prompt, text in zip(prompts(session, n), texts, strict=True)
            for gap in replay(session, prompt, text)
        ]
        full = [[*p, *t] for p, t in zip(prompts(session, 10), texts, strict=False)]
        return np.array(gaps), batch_shape_noise(session, full, depth + 1)


@pytest.mark.parametrize("depth", [1, 3])
def test_product_text_is_the_targets_within_noise(
    depth: int, capsys: pytest.CaptureFixture[str]
) -> None:
    gaps, noise = below_the_maximum(depth, 30)
    n_other = int((gaps > 0).sum())
    with capsys.disabled():
        print(
            f"\ndepth {depth}: batch-shape noise {noise:.4f}, {n_other} of {len(gaps)} tokens are "
            f"not the replay's argmax, the furthest {gaps.max():.4f} below it"
        )
    assert noise < 0.5  # a bound that says nothing would pass everything
    assert gaps.max() <= 4 * noise
    assert n_other <= 0.01 * len(gaps)


def test_mutant_on_product_settings_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "verify", trusting)
    gaps, noise = below_the_maximum(1, 10)
    assert gaps.max() > 4 * noise
    assert (gaps > 0).sum() > 0.01 * len(gaps)


# -- the drafter -------------------------------------------------------------------------------


def engine_parts(session: Session) -> tuple[Engine, Decoder]:
    engine = session.engine
    return engine, engine.drafting.drafter("mtp")._context  # type: ignore[union-attr]


@pytest.mark.parametrize(("depth", "floor"), [(1, 0.791), (2, 0.759)])
def test_acceptance_of_the_first_position(depth: int, floor: float) -> None:
    """What the model was measured at when it was trained, minus 0.01 (bench/demo_model)."""
    with product(depth) as session:
        _, total = answers(session, len(PROMPTS))
    assert total.accepted_per_position[0] / total.judged_per_position[0] >= floor


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_mtp_decodes_per_round_equal_the_depth(depth: int) -> None:
    with product(depth) as session:
        engine, mtp = engine_parts(session)
        [prompt] = prompts(session, 1)
        list(engine.generate([prompt], GREEDY, 40))
        before = mtp.n_decodes  # type: ignore[attr-defined]
        n_drafted = n_rounds = 0
        for chunk in engine.generate([prompt], GREEDY, 40):
            if chunk.stats:
                n_drafted, n_rounds = chunk.stats.drafted, chunk.stats.rounds
        # a draft of N tokens is N decodes, the catch-up of certain rows included
        assert mtp.n_decodes - before == n_drafted  # type: ignore[attr-defined]
        assert n_drafted >= depth * (n_rounds - 1)
