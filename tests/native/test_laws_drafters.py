"""Sampled text keeps its law whoever drafts: chi-square on the demo model, strict settings.

Copies are point masses, a draft model draws from a law of its own; the target's verdict must undo
both. Sixteen sequences draft beside each other, in one batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from gguf_mtp.bench.shallow import shallow_copy
from gguf_mtp.demo import demo_model
from gguf_mtp.drafters.draft_builder import DraftBuilder
from gguf_mtp.engine import request
from gguf_mtp.loading.loader import LoadOptions, load
from gguf_mtp.params import SamplingParams
from gguf_mtp.sampling.chain import SamplingChain
from gguf_mtp.session import Session
from gguf_mtp.types import Draft
from tests.support.sampled_laws import Cells, drawn, exact_law, excess

pytestmark = pytest.mark.native

# Rewarded for repeating its last tokens, so that copies hit as often as they miss.
PROMPT = "one two one two one"
PARAMS = SamplingParams(
    1.0, 40, 0.9, 0.0, repeat_penalty=1.1, frequency_penalty=-3.0, repeat_last_n=4
)
N = 3
SETS = ["model", "ngram", "ngram,model", "model,ngram,mtp"]


@pytest.fixture(autouse=True)
def drawn_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same draws on every run; and drafts are drawn from their law, which with these filters
    they would not be by default."""
    numbers = iter(range(1 << 30))

    def chain(params: SamplingParams, prompt: Sequence[int], constraint: None) -> SamplingChain:
        made = SamplingChain(params, prompt, constraint, np.random.default_rng(next(numbers)))
        made._filters.draws_drafts = True
        return made

    monkeypatch.setattr(request, "SamplingChain", chain)


@pytest.fixture(scope="module")
def draft_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shallow")
    return shallow_copy(demo_model(kind="f32"), folder / "shallow.gguf", range(5))


def strict(drafters: str, draft_model: Path) -> Session:
    file = draft_model if "model" in drafters else None
    options = LoadOptions(
        n_ctx=64,
        n_seq=16,
        draft=drafters,
        draft_model=file,
        draft_min=2,
        draft_max=2,
        strict=True,
    )
    return load(demo_model(kind="f32"), options)


def sample(drafters: str, draft_model: Path, n: int) -> tuple[Counter[tuple[int, ...]], Cells]:
    """Draws, and the exact law of the same tokens."""
    with strict(drafters, draft_model) as session:
        prompt = session.vocab.tokenize(PROMPT, True)
        seen = drawn(session, prompt, [PARAMS] * n, N)
        first = drafters.split(",")[0]
        assert session.engine.totals.by_drafter[first][2] > n / 20, "drafts were made and kept"
        return seen, exact_law(session, prompt, PARAMS, N)


@pytest.mark.parametrize("drafters", SETS[:2])
def test_drafted_text_follows_the_law(drafters: str, draft_model: Path) -> None:
    seen, law = sample(drafters, draft_model, 2_000)
    assert excess(seen, law) < 1


@pytest.mark.slow
@pytest.mark.parametrize("drafters", SETS)
def test_drafted_text_follows_the_law_closely(drafters: str, draft_model: Path) -> None:
    seen, law = sample(drafters, draft_model, 20_000)
    assert excess(seen, law) < 1


@pytest.mark.slow
def test_mutant_that_belittles_the_law_it_drew_from_is_caught(
    draft_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the draft seems unlikely it is always kept: the text follows the draft model then."""
    original = DraftBuilder.draft

    def small(self: DraftBuilder, source: str) -> Draft:
        draft = original(self, source)
        return draft._replace(
            probs=[law and law._replace(probs=1e-9 * law.probs) for law in draft.probs]
        )

    monkeypatch.setattr(DraftBuilder, "draft", small)
    seen, law = sample("model", draft_model, 2_000)
    assert excess(seen, law) > 1


@pytest.mark.slow
def test_mutant_that_stops_drafts_at_the_token_drawn_is_caught(
    draft_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule that looks at what was drawn, not at how sure the drafter was, shifts the law."""
    original = DraftBuilder.draft

    def cut(self: DraftBuilder, source: str) -> Draft:
        draft = original(self, source)
        n = next((k for k, token in enumerate(draft.tokens) if token % 2), len(draft.tokens))
        return _first(draft, n)

    monkeypatch.setattr(DraftBuilder, "draft", cut)
    seen, law = sample("model", draft_model, 2_000)
    assert excess(seen, law) > 1


def _first(draft: Draft, n: int) -> Draft:
    tokens: Sequence[int] = draft.tokens[:n]
    return Draft(tokens, draft.probs[:n], draft.confidence[:n], draft.source)
