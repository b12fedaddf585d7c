"""DeepSeek-V4 with DSpark: a small checkpoint, converted, compared, drafted with.

What the target's layers read, a block's logits and its confidences are those of transformers'
layers. Drafts of a random model are wrong; so that blocks are accepted too, some tests put the
right tokens in their place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from typer.testing import CliRunner

from gguf_mtp.cli.app import app
from gguf_mtp.converters import convert as pipeline
from gguf_mtp.converters.convert import ConvertOptions, convert, side_path
from gguf_mtp.depth import Watchdog
from gguf_mtp.drafters.dspark import DsparkDrafter
from gguf_mtp.engine import request
from gguf_mtp.errors import ConversionError, DecodeError, RequestError, UnsupportedModel
from gguf_mtp.gguf import model_facts
from gguf_mtp.gguf.arch import dflash
from gguf_mtp.llama import Context, ContextOptions, Model
from gguf_mtp.llama.block_context import BlockContext
from gguf_mtp.loading.loader import LoadOptions, load
from gguf_mtp.params import SamplingParams
from gguf_mtp.sampling.chain import SamplingChain
from gguf_mtp.types import Ask, Draft, Rows
from tests.support import v4_checkpoints
from tests.support.sampled_laws import drawn, exact_law, excess
from tests.support.serving import served_by, serving

pytestmark = pytest.mark.native

SIZE = 5
IDS = np.random.default_rng(3).integers(2, 3600, 161).tolist()
PROMPTS = [IDS[:117], IDS[40:80], IDS[100:161]]
GREEDY = SamplingParams(temperature=0)
STRICT = LoadOptions(n_ctx=512, n_threads=1, strict=True)
OPTIONS = ContextOptions(512, 2, 256, 256, n_threads=1, strict=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return v4_checkpoints.tiny(tmp_path_factory.mktemp("checkpoint") / "V4-0731", "dspark")


@pytest.fixture(scope="module")
def trunk(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trunk in F32, its stages beside it."""
    out = tmp_path_factory.mktemp("v4") / "tiny.gguf"
    account = convert(checkpoint, out, ConvertOptions(type="f32"))
    assert account.side == "dspark", "though the configuration names an MTP block"
    return out


@pytest.fixture(scope="module")
def stages(trunk: Path) -> Path:
    return side_path(trunk, "dspark")


# -- conversion ----------------------------------------------------------------------------------


def test_the_stages_are_a_file_of_their_own(trunk: Path, stages: Path) -> None:
    """Without embedding and head, which are the trunk's."""
    names = {t.name for t in GGUFReader(stages).tensors}
    assert {"fc.weight", "markov_w1.weight", "markov_w2.weight", "conf_proj.weight"} <= names
    assert not {"token_embd.weight", "output.weight"} & names
    facts = model_facts.read_any(stages)
    assert dflash.shape(facts) == (SIZE, 3615, (4, 5, 6))
    assert not side_path(trunk, "mtp").exists()


def test_a_drafter_alone_stays_sharp(checkpoint: Path, tmp_path: Path) -> None:
    account = convert(checkpoint, tmp_path / "d.gguf", ConvertOptions(type="q4_0", mtp="only"))
    assert account.is_dspark
    kinds = {t.name: t.tensor_type.name for t in GGUFReader(tmp_path / "d.gguf").tensors}
    assert kinds["markov_w2.weight"] == kinds["fc.weight"] == "Q8_0"
    assert kinds["blk.0.ffn_up_exps.weight"] == "MXFP4"
    assert kinds["conf_proj.weight"] == "F32"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dspark_target_layer_ids": [3, 9]}, r"dspark_target_layer_ids is \[3, 9\]"),
        ({"dspark_noise_token_id": 5000}, "dspark_noise_token_id is 5000"),
        ({"dspark_markov_rank": 8}, "but config.json implies"),
    ],
)
def test_a_wrong_configuration_is_refused(
    checkpoint: Path, change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    source = v4_checkpoints.changed(checkpoint, tmp_path / "changed", change)
    with pytest.raises(Exception, match=said):
        convert(source, tmp_path / "m.gguf", ConvertOptions())
    assert not list(tmp_path.glob("*.gguf*")), "the trunk neither"


def test_from_the_command_line(checkpoint: Path, tmp_path: Path) -> None:
    """Converted, verified with its drafter, looked at and run; the files refuse what they are not
    for."""
    out = tmp_path / "m.gguf"
    run = CliRunner().invoke
    done = run(app, ["convert", str(checkpoint), "-o", str(out), "--type", "f32", "--no-verify"])
    assert done.exit_code == 0, done.output
    assert "DSpark drafter: in a file of its own" in done.output
    shown = run(app, ["inspect", str(out)])
    assert "dspark-m.gguf next to it holds its DSpark drafter" in shown.output.replace("\n", " ")
    alone = run(app, ["inspect", str(side_path(out, "dspark"))])
    assert "DSpark, which drafts blocks of 5 tokens, without its model" in alone.output
    answer = ["run", str(out), "-p", "Hello", "-n", "5", "--draft", "dspark"]
    assert run(app, answer).exit_code == 0
    refused = run(app, ["run", str(side_path(out, "dspark")), "-p", "Hello"])
    assert "cannot be run: it holds DSpark" in str(refused.exception)


# -- equal to transformers -----------------------------------------------------------------------


def test_features_and_block_equal_transformers(checkpoint: Path, trunk: Path, stages: Path) -> None:
    """Over more rows than the stages' window has."""
    pytest.importorskip("transformers.models.deepseek_v4")
    from tests.support.v4_reference import Reference

    expected = Reference(checkpoint).draft(IDS)
    with Model(str(trunk)) as model, Model(str(stages)) as side:
        target, context = contexts(model, side)
        features = target.decode([Rows(0, 0, IDS[:-1], 3)]).outputs[0].hidden
        assert off(features, expected.features) < 1e-5
        block = drafted(context, 0, expected.features, IDS[-1])
        assert off(block.logits, expected.logits) < 1e-5
        assert off(block.hidden[:, 0], expected.confidence) < 1e-5
        context.rewind(0, 100)  # and again, in two pieces, beside another sequence
        context.decode([Rows(0, 100, IDS[100:-1], 0, expected.features[100:])])
        again, other = context.decode([block_at(0, 160), block_at(1, 0)]).outputs
        assert off(again.logits, expected.logits) < 1e-5
        assert off(other.logits, expected.logits) > 1e-2


def contexts(model: Model, side: Model) -> tuple[Context, BlockContext]:
    target = model.context(dataclasses.replace(OPTIONS, layers=(4, 5, 6)))
    return target, side.block_context(OPTIONS, target, SIZE)


def block_at(seq: int, pos: int) -> Rows:
    return Rows(seq, pos, [IDS[-1], *[3615] * (SIZE - 1)], SIZE)


def drafted(context: BlockContext, seq: int, features: Any, token: int) -> Any:
    n = len(features)
    context.decode([Rows(seq, 0, [0] * n, 0, features)])
    out = context.decode([Rows(seq, n, [token, *[3615] * (SIZE - 1)], SIZE)]).outputs[0]
    kept = out._replace(logits=out.logits.copy(), hidden=out.hidden.copy())
    context.rewind(seq, n)
    return kept


def off(found: Any, expected: Any) -> float:
    """The largest difference over the largest value."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def test_what_llama_cpp_would_draft_wrongly_is_refused(trunk: Path, stages: Path) -> None:
    with Model(str(trunk)) as model, Model(str(stages)) as side:
        _, context = contexts(model, side)
        features = np.zeros((2, 384), np.float32)
        for rows, said in (
            ([Rows(0, 0, [1] * 6, 6)], "at most 5 rows"),
            ([Rows(0, 0, [1] * 5, 5), Rows(1, 0, [1] * 4, 4)], "not of one length"),
            ([Rows(0, 0, [1] * 5, 4)], "logits for each"),
            ([Rows(0, 0, [1, 1], 1, features)], "have no logits"),
            ([Rows(0, 0, [1, 1], 0, features), Rows(1, 0, [1], 1)], "not of one length"),
            ([Rows(0, 0, [1, 1], 0, features[:, :128])], "have the shape"),
        ):
            with pytest.raises(DecodeError, match=said):
                context.decode(rows)
        with pytest.raises(UnsupportedModel, match="reads layer 7, but the model has 6"):
            model.context(dataclasses.replace(OPTIONS, layers=(7,)))


# -- drafting ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(trunk: Path) -> list[list[int]]:
    with load(trunk, dataclasses.replace(STRICT, draft="off")) as session:
        return [answers(session, [prompt])[0] for prompt in PROMPTS]


def answers(session: Any, prompts: list[list[int]]) -> list[list[int]]:
    found: dict[int, list[int]] = {}
    for chunk in session.engine.generate(prompts, GREEDY, 50):
        found.setdefault(chunk.seq, []).extend(chunk.tokens)
    return [found[i] for i in sorted(found)]


def right_ones(plain: list[list[int]], rng: np.random.Generator) -> Any:
    """`DsparkDrafter.propose`, with the tokens that plain decoding finds in place of the guesses,
    two in five blocks with a mistake."""
    propose = DsparkDrafter.propose
    texts = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, plain, strict=True)]

    def proposed(self: DsparkDrafter, asks: Sequence[Ask]) -> list[Draft]:
        drafts = []
        for ask, made in zip(asks, propose(self, asks), strict=True):
            n = len(ask.tokens)
            text = next(t for t in texts if t[:n] == list(ask.tokens))
            tokens = text[n : n + len(made.tokens)]
            if tokens and rng.random() < 0.4:
                tokens[int(rng.integers(len(tokens)))] = 5
            k = len(tokens)
            drafts.append(Draft(tokens, [None] * k, made.confidence[:k], made.source))
        return drafts

    return proposed


def test_a_draft_may_be_a_whole_block(trunk: Path) -> None:
    with load(trunk, STRICT) as session:
        assert session.engine.depth.n_max == SIZE


@pytest.mark.parametrize("depth", [1, 3, 5, 8])
@pytest.mark.parametrize("n_seq", [1, 3])
def test_drafts_change_nothing(
    trunk: Path, plain: list[list[int]], depth: int, n_seq: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(depth)
    monkeypatch.setattr(DsparkDrafter, "propose", right_ones(plain, rng))
    options = dataclasses.replace(
        STRICT, n_seq=n_seq, draft="dspark", draft_min=depth, draft_max=depth
    )
    with load(trunk, options) as session:
        assert answers(session, PROMPTS[:n_seq]) == plain[:n_seq]
        assert session.engine.stopped_drafting is None
        totals = session.engine.totals
        assert 10 < totals.accepted < totals.drafted
        assert session.side is not None


def test_it_drafts_by_itself_and_stops_where_it_is_never_right(
    trunk: Path, plain: list[list[int]]
) -> None:
    with load(trunk, dataclasses.replace(STRICT, n_seq=3)) as session:
        assert session.engine.drafting.names == ("ngram", "dspark")
        assert answers(session, PROMPTS) == plain


def test_a_kept_prefix_a_branch_and_a_saved_state_draft_the_same(trunk: Path) -> None:
    """The block behind a text does not depend on how its rows came into the drafter's cache."""
    options = dataclasses.replace(STRICT, n_seq=2, draft="dspark", draft_min=5, draft_max=5)
    blocks: dict[int, list[int]] = {}
    propose = DsparkDrafter.propose

    def watched(self: DsparkDrafter, asks: Sequence[Ask]) -> list[Draft]:
        made = propose(self, asks)
        for ask, draft in zip(asks, made, strict=True):
            if list(ask.tokens[: len(longer)]) == longer:
                blocks[len(ask.tokens)] = list(draft.tokens)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DsparkDrafter, "propose", watched)
        longer = [*IDS[:150], 7]
        with load(trunk, options) as session:
            expected = answers(session, [longer]), dict(blocks)
            assert len(expected[1]) > 20
        with load(trunk, options) as session:
            held = [*IDS[:150], *answers(session, [IDS[:150]])[0]]
            state = session.engine.save(held)
            for prepare in (
                lambda: answers(session, [[*IDS[:120], 8, 9]]),  # shares a part, which is cut back
                lambda: session.engine.restore(state),
                lambda: answers(session, [IDS[:150], [*IDS[:140], 6]]),  # a branch beside it
            ):
                prepare()
                blocks.clear()
                assert (answers(session, [longer]), blocks) == expected
            session.engine.restore(state)
            longer = [*held, 7]
            blocks.clear()
            expected = answers(session, [longer]), dict(blocks)
        with load(trunk, options) as session:
            assert (answers(session, [longer]), blocks) == expected


def test_files_that_do_not_fit_are_refused(trunk: Path, stages: Path, tmp_path: Path) -> None:
    from gguf_mtp.demo import demo_model

    with pytest.raises(UnsupportedModel, match="drafts for DeepSeek-V4, but"):
        load(demo_model(), dataclasses.replace(STRICT, strict=False, draft_model=stages))
    with pytest.raises(UnsupportedModel, match="holds no DSpark drafter"):
        load(trunk, dataclasses.replace(STRICT, draft="dspark", draft_model=trunk))
    with pytest.raises(RequestError, match="mtp and dspark read different rows"):
        load(trunk, dataclasses.replace(STRICT, draft="mtp,dspark"))
    lonely = tmp_path / "lonely.gguf"
    lonely.symlink_to(trunk)
    with pytest.raises(UnsupportedModel, match="no file with a DSpark drafter"):
        load(lonely, dataclasses.replace(STRICT, draft="dspark"))


def test_an_interruption_in_the_stages_loses_nothing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both files or none: the trunk that was written is neither named nor written again."""
    out, options = tmp_path / "m.gguf", ConvertOptions(type="q8_0")
    fill, filled = pipeline._fill, list[tuple[str, int]]()

    def full_disk(job: Any, shard: Any, file: Any, *rest: Any) -> None:
        if file.out.name.startswith("dspark-") and len(filled) == 1:
            raise OSError(28, "No space left on device")
        filled.append((file.out.name, len(shard.tensors) - file.n_done))
        fill(job, shard, file, *rest)

    monkeypatch.setattr(pipeline, "_fill", full_disk)
    with pytest.raises(ConversionError, match="--resume continues"):
        convert(checkpoint, out, options)
    assert not list(tmp_path.glob("*.gguf"))
    with pytest.raises(ConversionError, match="--resume continues it"):
        convert(checkpoint, out, options)
    filled += [("again", 0)]
    convert(checkpoint, out, dataclasses.replace(options, resume=True))
    assert filled[2] == ("m.gguf", 0), "of the trunk nothing is left to do"
    assert filled[3] == ("dspark-m.gguf", 81)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dspark-m.gguf", "m.gguf"]
    model_facts.read(out)
    model_facts.read_any(side_path(out, "dspark"))


def test_resume_alone_does_not_replace_a_finished_model(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    command = ["convert", str(checkpoint), "-o", str(out), "--no-verify"]
    assert CliRunner().invoke(app, command).exit_code == 0
    again = CliRunner().invoke(app, [*command, "--resume"])
    assert "no interrupted run of it is left; --force replaces it" in str(again.exception)


def test_drafted_text_follows_the_law(trunk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight sequences in one batch, drafts drawn from the stages' own laws; chi-square."""
    params = SamplingParams(1.0, 6, 0.9, 0.0)
    numbers = iter(range(1 << 30))

    def chain(params: SamplingParams, prompt: Sequence[int], _: None) -> SamplingChain:
        made = SamplingChain(params, prompt, rng=np.random.default_rng(next(numbers)))
        made._filters.draws_drafts = True
        return made

    monkeypatch.setattr(request, "SamplingChain", chain)
    monkeypatch.setattr(Watchdog, "update", lambda *_: None)  # a random drafter is never right
    options = dataclasses.replace(
        STRICT, n_ctx=64, n_seq=8, draft="dspark", draft_min=2, draft_max=2
    )
    with load(trunk, options) as session:
        seen = drawn(session, IDS[:9], [params] * 1_500, 2)
        assert session.engine.totals.drafted > 1_000
        assert session.engine.stopped_drafting is None
        assert excess(seen, exact_law(session, IDS[:9], params, 2)) < 1


def test_eight_sequences_do_not_hear_each_other(trunk: Path) -> None:
    """Of different lengths, ended and begun while others go on: each as it is alone."""
    prompts = [IDS[3 * i : 3 * i + 5 + 17 * (i % 4)] for i in range(16)]
    with load(trunk, dataclasses.replace(STRICT, n_ctx=160, draft="off")) as session:
        alone = [cut(session, prompt, 6 + 5 * (i % 3)) for i, prompt in enumerate(prompts)]
    options = dataclasses.replace(
        STRICT, n_ctx=160, n_seq=8, draft="ngram,dspark", draft_min=0, draft_max=5
    )
    with load(trunk, options) as session:
        engine, answers_of = session.engine, dict[int, list[int]]()
        ids = [engine.submit(p, GREEDY, 6 + 5 * (i % 3)) for i, p in enumerate(prompts)]
        while not engine.is_idle:
            for chunk in engine.step():
                answers_of.setdefault(chunk.seq, []).extend(chunk.tokens)
        assert [answers_of[i] for i in ids] == alone


def cut(session: Any, prompt: list[int], n: int) -> list[int]:
    return [t for chunk in session.engine.generate([prompt], GREEDY, n) for t in chunk.tokens]


def test_it_chats_and_serves(trunk: Path) -> None:
    said = CliRunner().invoke(app, ["chat", str(trunk), "-n", "4"], input="Hello\n/stats\n")
    assert said.exit_code == 0, said.output
    options = dataclasses.replace(STRICT, draft="dspark", draft_min=2, draft_max=2)
    with load(trunk, options) as session:
        template = session.vocab.chat_template
        assert template
        with serving(session.engine, served_by(session, template)) as server:
            whole = server.answer(max_tokens=5)
        assert whole["timings"]["by_drafter"].keys() == {"dspark"}
