"""Every set of drafters on the demo model: the text of plain decoding, token for token."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import gguf_mtp
from gguf_mtp.bench.shallow import shallow_copy
from gguf_mtp.demo import demo_model
from gguf_mtp.errors import ConversionError, RequestError
from gguf_mtp.loading.loader import LoadOptions
from gguf_mtp.params import RequestOptions, SamplingParams
from gguf_mtp.session import Session
from gguf_mtp.stats import Stats

pytestmark = pytest.mark.native

GREEDY = SamplingParams(temperature=0)
QUESTIONS = json.loads(Path("bench/prompts/held_out.json").read_text(encoding="utf-8"))
STRICT = LoadOptions(n_ctx=320, n_seq=4, n_threads=1, strict=True)
FIVE_LAYERS = range(5)  # of six: the first token of two is right, of four the rest rarely
N_TOKENS = 50


@pytest.fixture(scope="module")
def draft_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shallow")
    return shallow_copy(demo_model(kind="f32"), folder / "shallow.gguf", FIVE_LAYERS)


def load(draft: str, draft_model: Path | None = None, depth: int | None = 3) -> Session:
    """`depth` None is automatic."""
    bounds = (0, 8) if depth is None else (depth, depth)
    options = replace(STRICT, draft=draft, draft_model=draft_model)
    return gguf_mtp.load(
        demo_model(kind="f32"), replace(options, draft_min=bounds[0], draft_max=bounds[1])
    )


def prompts(session: Session) -> list[list[int]]:
    """Questions, and a passage that repeats itself."""
    asked = [session.chat_tokens([{"role": "user", "content": q}]) for q in QUESTIONS[:5]]
    lines = "".join(f"{q}\n" for q in QUESTIONS[5:8])
    return [*asked, session.vocab.tokenize(3 * lines + QUESTIONS[5][:8], add_special=True)]


def answers(session: Session) -> tuple[list[list[int]], Stats]:
    texts: dict[int, list[int]] = {}
    for chunk in session.engine.generate(prompts(session), GREEDY, N_TOKENS):
        texts.setdefault(chunk.seq, []).extend(chunk.tokens)
    return [texts[i] for i in sorted(texts)], session.engine.totals


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    with load("off") as session:
        return answers(session)[0]


@pytest.mark.parametrize(
    "lineup", ["ngram", "mtp", "model", "ngram,mtp", "mtp,ngram", "model,ngram,mtp"]
)
@pytest.mark.parametrize("depth", [3, None])
def test_text_is_that_of_plain_decoding(
    lineup: str, depth: int | None, plain: list[list[int]], draft_model: Path
) -> None:
    with load(lineup, draft_model if "model" in lineup else None, depth) as session:
        assert session.engine.drafting.names == tuple(lineup.split(","))
        texts, totals = answers(session)
        assert texts == plain
        if depth is not None:
            first = lineup.split(",")[0]
            least = 2 if first == "ngram" else 50
            assert totals.by_drafter[first][2] > least, "accepted"
        assert session.engine.drafting.names == tuple(lineup.split(",")), "one has failed"


def test_a_model_drafts_for_itself_without_a_mistake() -> None:
    with load("model", demo_model(kind="f32")) as session:
        _, totals = answers(session)
        assert totals.accepted_per_position == totals.judged_per_position[:3]
        assert totals.accepted > 100


def test_copies_hit_where_a_text_repeats_itself() -> None:
    """Past the end of its answer the demo goes in circles."""
    with load("ngram") as session:
        engine = session.engine
        engine.limits = replace(engine.limits, end_tokens=frozenset())
        [*_, last] = engine.generate([prompts(session)[0]], GREEDY, 200)
        assert last.stats
        [_, drafted, accepted] = last.stats.by_drafter["ngram"]
        assert accepted > 0.7 * drafted > 50
        assert last.stats.rounds < 0.6 * 200


def test_a_request_draws_from_the_drafters_it_names(draft_model: Path) -> None:
    with load("model,ngram,mtp", draft_model) as session:
        engine, [prompt, *_] = session.engine, prompts(session)
        for wish, used in (
            (None, {"model"}),
            (("mtp",), {"mtp"}),
            (("model", "ngram"), {"model"}),
            ((), set()),
        ):
            id_ = engine.submit(prompt, GREEDY, 30, RequestOptions(draft=wish))
            while not engine.is_idle:
                for chunk in engine.step():
                    if chunk.seq == id_ and chunk.stats:
                        assert set(chunk.stats.by_drafter) == used, wish


def test_auto_takes_what_there_is(draft_model: Path) -> None:
    for path, options, names in (
        (demo_model(kind="f32"), STRICT, ("ngram", "mtp")),
        (draft_model, STRICT, ("ngram",)),
        (demo_model(kind="f32"), replace(STRICT, draft_model=draft_model), ("ngram", "model")),
        (demo_model(kind="f32"), replace(STRICT, draft="off"), ()),
        (demo_model(kind="f32"), replace(STRICT, draft_max=0), ()),
    ):
        with gguf_mtp.load(path, options) as session:
            assert session.engine.drafting.names == names
            assert session.engine.is_drafting == bool(names)


def test_wishes_are_refused_before_anything_is_loaded() -> None:
    with pytest.raises(RequestError, match="'eagle' is not one of"):
        LoadOptions(draft="eagle")


def test_saved_with_its_drafters_and_taken_up_again(draft_model: Path) -> None:
    with load("model,ngram,mtp", draft_model) as session, load("model,ngram,mtp", draft_model) as b:
        prompt = prompts(session)[-1]
        chunks = list(session.engine.generate([prompt], GREEDY, 20))
        tokens = [*prompt, *(t for chunk in chunks for t in chunk.tokens)]
        assert b.engine.restore(session.engine.save(tokens)) == tokens
        more = [list(s.engine.generate([tokens], GREEDY, 20)) for s in (session, b)]
        texts = [[t for chunk in chunks for t in chunk.tokens] for chunks in more]
        counts = [chunks[-1].stats.by_drafter for chunks in more if chunks[-1].stats]
        assert texts[0] == texts[1]
        assert counts[0] == counts[1]


@pytest.mark.parametrize("layers", [[], [1, 0], [0, 0], [0, 6], [-1, 0]])
def test_layers_that_are_not_there(layers: list[int], tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="which has 6"):
        shallow_copy(demo_model(kind="f32"), tmp_path / "x.gguf", layers)
