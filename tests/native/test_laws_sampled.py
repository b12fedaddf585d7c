"""Sampling under drafting on the demo model: laws by chi-square, seeds to the token, logprobs.

Strict settings: every row is the same to the last bit however it was decoded, so no token stands
within noise of a filter's edge, and none has to be left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import pytest

from gguf_mtp.demo import demo_model
from gguf_mtp.engine import request
from gguf_mtp.loading.loader import LoadOptions, load
from gguf_mtp.params import RequestOptions, SamplingParams
from gguf_mtp.sampling import chain as sampling
from gguf_mtp.sampling import verify
from gguf_mtp.sampling.chain import SamplingChain
from gguf_mtp.sampling.penalties import TokenHistory
from gguf_mtp.session import Session
from gguf_mtp.types import Chunk, Decoder, Distribution, Draft, Rows, Verdict
from tests.support.sampled_laws import Cells, drawn, exact_law, excess

pytestmark = pytest.mark.native

N_SEQ, DEPTH, N = 16, 3, 3


class Case(NamedTuple):
    """A prompt and how to go on from it. `ECHO` is rewarded for repeating its last token, so that
    what a drafted token changes for the next one weighs."""

    prompt: str
    params: SamplingParams


PLAIN = SamplingParams(
    0.7, 40, 0.9, 0.0, repeat_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.4
)
ECHO = SamplingParams(1.0, 40, 0.9, 0.0, presence_penalty=-3.0, repeat_last_n=1)
CASES = {"0.7": Case("the the the the the", PLAIN), "1.0": Case("the the the the the", ECHO)}


def strict(depth: int, n_seq: int) -> Session:
    options = LoadOptions(n_ctx=256, n_seq=n_seq, draft_min=depth, draft_max=depth, strict=True)
    return load(demo_model(kind="f32"), options)


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with strict(DEPTH, N_SEQ) as session:
        yield session


@pytest.fixture(scope="module")
def laws(session: Session) -> dict[str, Cells]:
    return {
        name: exact_law(session, session.vocab.tokenize(case.prompt, True), case.params, N)
        for name, case in CASES.items()
    }


WAYS = ("drawn", "certain", "seeded")
"""Drafts drawn from their law and judged by min(1, p / q); the likeliest token drafted; a seed."""


def measured(session: Session, laws: dict[str, Cells], name: str, way: str, n: int) -> float:
    """`excess` over `n` answers; the same on every run."""
    case, numbers = CASES[name], iter(range(n))

    def chain(params: SamplingParams, prompt: Sequence[int], constraint: None) -> SamplingChain:
        made = SamplingChain(params, prompt, constraint, np.random.default_rng(next(numbers)))
        made._filters.draws_drafts = way == "drawn"
        return made

    seeds = range(n) if way == "seeded" else [None] * n
    wishes = [dataclasses.replace(case.params, seed=s) for s in seeds]
    before = session.engine.totals.accepted
    with patch.object(request, "SamplingChain", chain):
        seen = drawn(session, session.vocab.tokenize(case.prompt, True), wishes, N)
    assert session.engine.totals.accepted - before > n / 8  # drafts were made and kept
    return excess(seen, laws[name])


@pytest.mark.parametrize(("name", "way"), [("0.7", "drawn"), ("1.0", "seeded")])
def test_drafted_text_follows_the_law(
    session: Session, laws: dict[str, Cells], name: str, way: str
) -> None:
    assert measured(session, laws, name, way, 2_000) < 1


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_drafted_text_follows_the_law_closely(
    session: Session, laws: dict[str, Cells], name: str, way: str
) -> None:
    assert measured(session, laws, name, way, 20_000) < 1


def test_mutant_that_draws_anew_is_caught(
    session: Session, laws: dict[str, Cells], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "residual", lambda p, _: p)
    assert measured(session, laws, "0.7", "drawn", 1_200) > 1


def test_mutant_that_keeps_whatever_the_filters_pass_is_caught(
    session: Session, laws: dict[str, Cells], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lenient(
        draft: Draft, target: Callable[[int], Distribution], chain: SamplingChain
    ) -> Verdict:
        for k, token in enumerate(draft.tokens):
            if token not in target(k).ids:
                return Verdict(k, chain.draw(target(k)))
        return Verdict(len(draft.tokens), chain.draw(target(len(draft.tokens))))

    monkeypatch.setattr(request, "verify", lenient)
    assert measured(session, laws, "0.7", "certain", 500) > 1


def test_mutant_whose_penalties_do_not_see_the_draft_is_caught(
    session: Session, laws: dict[str, Cells], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = TokenHistory.seen
    monkeypatch.setattr(TokenHistory, "seen", lambda self, _: original(self, ()))
    assert measured(session, laws, "1.0", "seeded", 500) > 1


def test_mutant_whose_noise_is_alike_for_all_tokens_is_caught(
    session: Session, laws: dict[str, Cells], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = sampling.uniforms
    monkeypatch.setattr(sampling, "uniforms", lambda seed, at, ids: original(seed, at, 0 * ids))
    assert measured(session, laws, "1.0", "seeded", 500) > 1


# -- seeds ---------------------------------------------------------------------------------------

PROMPTS = ["What is a sand dune?", "Write the Python function compress.", "Who?", "1, 1, 2, 3,"]
SEEDED = [
    SamplingParams(0.7, seed=1),
    SamplingParams(1.0, seed=2, frequency_penalty=0.5, repeat_penalty=1.05),
    SamplingParams(1.3, 0, 1.0, 0.0, seed=3),  # its drafts are drawn
    SamplingParams(1.0, seed=4, typical_p=0.9, logit_bias=((5, 2.0),)),
]


def seeded_texts(depth: int, together: bool) -> tuple[list[list[int]], int]:
    """One text a prompt, each with parameters of its own; and how many draft tokens were kept."""
    texts: dict[int, list[int]] = {}
    with strict(depth, 4 if together else 1) as session:
        engine = session.engine
        for prompt, params in zip(PROMPTS, SEEDED, strict=True):
            asked = session.chat_tokens([{"role": "user", "content": prompt}])
            texts[engine.submit(asked, params, 60)] = []
            while not (together or engine.is_idle):
                collect(engine.step(), texts)
        while not engine.is_idle:
            collect(engine.step(), texts)
        return list(texts.values()), engine.totals.accepted


def collect(chunks: Sequence[Chunk], texts: dict[int, list[int]]) -> None:
    for chunk in chunks:
        texts[chunk.seq] += chunk.tokens


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return seeded_texts(0, together=False)[0]


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("together", [False, True], ids=["alone", "four"])
def test_a_seed_gives_one_text(depth: int, together: bool, plain: list[list[int]]) -> None:
    texts, n_accepted = seeded_texts(depth, together)
    assert texts == plain
    assert n_accepted > 20


def test_a_seed_gives_one_text_beside_others_without_drafts(plain: list[list[int]]) -> None:
    assert seeded_texts(0, together=True)[0] == plain
    assert seeded_texts(0, together=False)[0] == plain


def test_mutant_that_counts_places_from_the_draft_is_caught(
    plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text depends on what was drafted then."""
    original = SamplingChain.draw
    monkeypatch.setattr(SamplingChain, "draw", lambda self, law, _=(): original(self, law))
    assert seeded_texts(2, together=False)[0] != plain


# -- log-probabilities ---------------------------------------------------------------------------


def test_logprobs_are_those_of_a_teacher_forced_run() -> None:
    """Accepted draft tokens too; whatever penalties and filters made of the row."""
    with strict(3, 2) as session:
        engine, prompt = session.engine, session.vocab.tokenize("The quick brown", True)
        params = SamplingParams(0.8, repeat_penalty=1.2, seed=5)
        asked = engine.submit(prompt, params, 50, RequestOptions(n_logprobs=4))
        engine.submit(prompt, params, 50)
        tokens, likely, n_kept = [], [], 0
        while not engine.is_idle:
            for chunk in engine.step():
                if chunk.seq != asked:
                    assert chunk.logprobs is None
                elif chunk.tokens:
                    assert chunk.logprobs is not None
                    tokens += chunk.tokens
                    likely += chunk.logprobs
                    n_kept += chunk.n_from_draft
        target: Decoder = engine._target
        target.rewind(0, 0)
        rows = []
        for pos, token in enumerate([*prompt, *tokens][:-1]):
            rows.append(target.decode([Rows(0, pos, [token], 1)]).outputs[0].logits[0].copy())
    assert n_kept > 10
    assert [entry.token for entry in likely] == tokens
    for row32, entry in zip(rows[len(prompt) - 1 :], likely, strict=True):
        row = row32.astype(np.float64)
        logprobs = row - np.log(np.exp(row - row.max()).sum()) - row.max()
        best = (-logprobs).argsort(kind="stable")[:4]
        assert entry.logprob == pytest.approx(logprobs[entry.token], abs=1e-4)
        assert [i for i, _ in entry.top] == best.tolist()
        assert [p for _, p in entry.top] == pytest.approx(logprobs[best].tolist(), abs=1e-4)
