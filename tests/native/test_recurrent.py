"""Models with recurrent layers: small, random. Whatever is drafted for them, the text is plain's.

A random MTP block is never right, so most drafts here are an oracle's: the plain answer, with
errors mixed in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gguf_mtp.depth import FixedDepth
from gguf_mtp.engine.config import EngineLimits
from gguf_mtp.engine.engine import Engine
from gguf_mtp.errors import CannotRewind, UnsupportedModel
from gguf_mtp.gguf import model_facts
from gguf_mtp.gguf.cache_layout import GOES_BACK, WITH_BLOCK, why_no_draft
from gguf_mtp.llama import ContextOptions, Model, ModelOptions
from gguf_mtp.loading.loader import LoadOptions, load
from gguf_mtp.offload import CPU, Subject
from gguf_mtp.offload.options import PlacementOptions
from gguf_mtp.params import SamplingParams
from gguf_mtp.placement import context_size
from gguf_mtp.placement.checked_plan import _ask, plan_placement
from gguf_mtp.types import Drafter, Floats, Rows
from tests.support import recurrent_models
from tests.support.oracle import Oracle

pytestmark = pytest.mark.native

GREEDY = SamplingParams(temperature=0)
N, N_SEQ, N_ANSWER = 4, 3, 40
BEGINNING = [*range(5, 37)] * 2
PROMPTS = [[*BEGINNING, 40, 41], BEGINNING, [7, 8, 9, 100]]
EOS = 257


@pytest.fixture(scope="module", params=GOES_BACK)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("recurrent") / f"{request.param}.gguf"
    return recurrent_models.write(file, request.param)


@pytest.fixture(scope="module")
def with_block(path: Path) -> Path:
    if path.stem not in WITH_BLOCK:
        pytest.skip("it has no MTP block")
    return path


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    with Model(str(path)) as loaded:
        yield loaded


def engine_of(
    model: Model, depth: int, drafters: Sequence[Drafter] = (), ends: frozenset[int] = frozenset()
) -> Engine:
    options = ContextOptions(
        512 * N_SEQ, N_SEQ, 512, N_SEQ * (1 + N), n_threads=1, strict=True, n_rewind=depth
    )
    limits = EngineLimits(512, N_SEQ, 512, ends)
    return Engine(model.context(options), drafters, FixedDepth(depth), limits)


def answers(engine: Engine, prompts: Sequence[Sequence[int]], n: int = N_ANSWER) -> list[list[int]]:
    found: dict[int, list[int]] = {i: [] for i in range(len(prompts))}
    for chunk in engine.generate(prompts, GREEDY, n):
        found[chunk.seq] += chunk.tokens
    return list(found.values())


@pytest.fixture(scope="module")
def plain(model: Model) -> list[list[int]]:
    """Each prompt's answer, alone in a cache that keeps one state."""
    return [answers(engine_of(model, 0), [prompt])[0] for prompt in PROMPTS]


def oracle(plain: Sequence[Sequence[int]]) -> Oracle:
    return Oracle([[*p, *a] for p, a in zip(PROMPTS, plain, strict=True)])


@pytest.mark.parametrize("depth", range(1, N + 1))
@pytest.mark.parametrize("n_seq", [1, 2, 3])
def test_drafts_right_and_wrong_change_nothing(
    model: Model, plain: list[list[int]], depth: int, n_seq: int
) -> None:
    engine = engine_of(model, depth, [oracle(plain)])
    for start in range(3):
        order = [(start + i) % 3 for i in range(n_seq)]
        assert answers(engine, [PROMPTS[i] for i in order]) == [plain[i] for i in order]
    totals = engine.totals
    assert totals.accepted > 15 * depth
    assert totals.drafted > totals.accepted + 10


@pytest.mark.parametrize("n", range(1, 8))
def test_an_answer_is_cut_at_max_tokens(model: Model, plain: list[list[int]], n: int) -> None:
    engine = engine_of(model, N, [oracle(plain)])
    assert answers(engine, PROMPTS, n) == [a[:n] for a in plain]
    told = [[*p, *a[:n]] for p, a in zip(PROMPTS, plain, strict=True)]  # and goes on
    assert answers(engine, told, 9) == [a[n : n + 9] for a in plain]


@pytest.mark.parametrize("at", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("depth", [0, N])
def test_an_answer_that_ends_goes_on_from_there(
    model: Model, plain: list[list[int]], depth: int, at: int
) -> None:
    """At temperature 0 the plain answer's own token becomes an end token."""
    end = plain[0][at]
    until = plain[0].index(end)
    engine = engine_of(model, depth, [oracle(plain)], frozenset([end]))
    assert answers(engine, PROMPTS[:1]) == [plain[0][:until]]
    told = [*PROMPTS[0], *plain[0][:until], end, 60, 61, 62]
    id_ = engine.submit(told, GREEDY, 12)
    chunks = []
    while not engine.is_idle:
        chunks += engine.step()
    assert {c.seq for c in chunks} == {id_}
    assert chunks[-1].stats is not None
    assert chunks[-1].stats.cached_tokens == len(told) - 4
    fresh = engine_of(model, 0, (), frozenset([end]))
    assert [t for c in chunks for t in c.tokens] == answers(fresh, [told], 12)[0]


def test_what_is_not_kept_is_read_again(model: Model, plain: list[list[int]]) -> None:
    """Another branch of a conversation, one broken off, and the same one again."""
    engine = engine_of(model, N, [oracle(plain)])
    answers(engine, PROMPTS)
    assert answers(engine, PROMPTS[::-1]) == plain[::-1]
    id_ = engine.submit(PROMPTS[1], GREEDY, N_ANSWER)
    for _ in range(3):
        engine.step()
    engine.cancel(id_)
    assert answers(engine, PROMPTS[:2]) == plain[:2]
    branch = [*PROMPTS[2], *plain[2][:9], 33, 34]
    assert answers(engine, [branch]) == answers(engine_of(model, 0), [branch])


@pytest.mark.parametrize("n", [11, 12, 13, 14])
def test_a_sequence_is_saved_and_goes_on(model: Model, plain: list[list[int]], n: int) -> None:
    """Rejected rows just dropped included: of which state is the newest the bytes must know."""
    engine = engine_of(model, N, [oracle(plain)])
    id_ = engine.submit(PROMPTS[0], GREEDY, N_ANSWER)
    told = list(PROMPTS[0])
    while len(told) < len(PROMPTS[0]) + n:
        told += [t for c in engine.step() for t in c.tokens]
    engine.cancel(id_)
    data = engine.save(told)
    for where in (engine, engine_of(model, 2, [oracle(plain)])):
        answers(where, [[9] * 20] * N_SEQ, 5)
        assert where.restore(data) == told
        [answer] = answers(where, [told], 20)
        assert answer == plain[0][len(told) - len(PROMPTS[0]) :][:20]


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("draft", ["mtp", "ngram", "ngram,mtp"])
def test_its_own_drafters_change_nothing(
    path: Path, plain: list[list[int]], depth: int, draft: str
) -> None:
    if "mtp" in draft and path.stem not in WITH_BLOCK:
        pytest.skip("it has no MTP block")
    options = LoadOptions(
        n_ctx=256, n_seq=3, strict=True, draft=draft, draft_min=depth, draft_max=depth
    )
    expected = [a[: a.index(EOS)] if EOS in a else a for a in plain]
    with load(path, options) as session:
        assert answers(session.engine, PROMPTS) == expected
        assert answers(session.engine, PROMPTS[:1]) == expected[:1]
        # Where nothing repeats itself there is nothing to copy.
        assert session.engine.totals.drafted > 0 or draft == "ngram"


def test_the_block_is_a_layer_of_attention(with_block: Path) -> None:
    """It reads tokens and hidden rows, keeps rows, and can drop and copy any of them."""
    rng = np.random.default_rng(2)
    tokens, hidden = rng.integers(5, 290, 9).tolist(), rng.standard_normal((9, 64), np.float32)
    with Model(str(with_block), ModelOptions(load_mtp=True)) as model:
        options = ContextOptions(512, 2, 32, 32, n_threads=1, strict=True, is_mtp=True)

        def rows(seq: int, start: int, end: int, shift: int = 0) -> Rows:
            part = [t + shift for t in tokens[start:end]]
            return Rows(seq, start + 1, part, end - start, hidden[start:end])

        def logits(*batch: Rows) -> Floats:
            outputs = context.decode(batch).outputs
            return np.concatenate([o.logits.copy() for o in outputs])

        context = model.context(options)
        alone = np.concatenate([logits(rows(0, i, i + 1)) for i in range(9)])
        context.rewind(0, 4)  # row 3 is the last one left
        np.testing.assert_allclose(logits(rows(0, 3, 9)), alone[3:], atol=1e-4)
        context.copy(0, 1, 6)
        np.testing.assert_allclose(logits(rows(1, 5, 9)), alone[5:], atol=1e-4)
        context.rewind(0, 6)
        context.rewind(1, 6)
        other = logits(rows(0, 5, 9, shift=1), rows(1, 5, 9))
        np.testing.assert_allclose(other[4:], alone[5:], atol=1e-4)
        assert np.abs(other[:4] - alone[5:]).max(1).min() > 0.1
        context.rewind(0, 6)
        hidden[5:] *= -1
        assert np.abs(logits(rows(0, 5, 9)) - alone[5:]).max(1).min() > 0.1


def test_a_file_says_that_it_drafts_and_at_what_price(with_block: Path) -> None:
    facts = model_facts.read(with_block)
    assert facts.can_draft
    layers, size = {
        "qwen35": ("3 of 4", "0.02"), "qwen35moe": ("3 of 4", "0.02"),
        "nemotron_h_moe": ("2 of 5", "0.01"), "bailingmoe3": ("3 of 4", "0.01"),
    }[facts.architecture]  # fmt: skip
    assert facts.reason == (
        f"blk.{facts.n_layer} is an MTP block that llama.cpp can run; {layers} layers are "
        f"recurrent, so each sequence keeps a state of {size} MiB, plus one more for each token of "
        "--draft-max"
    )


def test_one_whose_states_are_not_kept_runs_plain(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = recurrent_models.write(tmp_path / "model.gguf", "qwen3next")
    assert "recurrent layers" in model_facts.read(file).reason
    with load(file, LoadOptions(n_ctx=256, strict=True)) as session:
        assert not session.engine.is_drafting
        engine = session.engine
        assert len(answers(engine, PROMPTS[:1])[0]) == N_ANSWER
        engine.limits = replace(engine.limits, end_tokens=frozenset(range(100)))
        [answer] = answers(engine, PROMPTS[2:])  # it has to end without going back
        assert len(answer) < N_ANSWER
        assert answers(engine, [[*PROMPTS[2], *answer, 0, 7]])
        assert engine.totals.cached_tokens == len(PROMPTS[2]) + len(answer)
    assert any("drafting is off: the model has recurrent layers" in m for m in caplog.messages)
    for draft in ("ngram", "mtp"):
        with pytest.raises(UnsupportedModel, match=r"not possible with .*recurrent layers"):
            load(file, LoadOptions(n_ctx=256, draft=draft))


@pytest.mark.parametrize("n_draft", [0, 3, 8])
@pytest.mark.parametrize("n_seq", [1, 3])
def test_its_states_are_in_the_plan(path: Path, n_draft: int, n_seq: int) -> None:
    """Against llama.cpp's own account, which allocates nothing."""
    facts = model_facts.read(path)
    contexts = context_size.contexts(1024, n_seq, n_draft, n_draft > 0 and facts.can_draft)
    plan = plan_placement(
        Subject(facts, context_size.with_states(contexts, facts, n_draft)), PlacementOptions()
    ).plan
    found = _ask(plan, Subject(facts, plan.contexts), [])
    assert found is not None
    weights, cache, buffers = found[CPU]
    assert plan.weights(CPU) == pytest.approx(weights, rel=0.01)
    assert plan.cache(CPU) == cache
    assert 0.7 * buffers < plan.compute[CPU] < 2.0 * buffers


def test_a_window_beside_recurrent_layers_is_not_drafted_over() -> None:
    kv = {"lfm2.attention.sliding_window": 512}
    assert why_no_draft({}, "lfm2") is None
    assert why_no_draft(kv, "lfm2") == "the model has recurrent layers and sliding-window attention"


def test_it_is_no_draft_model(path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="cannot be a draft model: it has recurrent"):
        load(path, LoadOptions(n_ctx=256, draft="model", draft_model=path))


def test_a_state_is_copied_whole_or_not_at_all(model: Model) -> None:
    context = model.context(ContextOptions(256, 2, 8, 8, n_threads=1, strict=True))
    context.decode([Rows(0, 0, [5, 6, 7, 8], 1)])
    with pytest.raises(CannotRewind, match="state of this model after 2 rows is not kept"):
        context.copy(0, 1, 2)
    assert context.n_past(1) == 0
    context.copy(0, 1, 4)
    theirs = context.decode([Rows(0, 4, [9], 1)]).outputs[0].logits.copy()
    ours = context.decode([Rows(1, 4, [9], 1)]).outputs[0].logits
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
