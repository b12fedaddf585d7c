"""Who drafts for a model, by the headers of files and what the user wishes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gguf_mtp.drafters.registry import DRAFTERS, parse_drafters
from gguf_mtp.errors import RequestError, UnsupportedModel
from gguf_mtp.gguf import model_facts
from gguf_mtp.loading.select import DrafterSelection, DraftOptions, select_drafters
from tests.support.gguf_files import Model
from tests.unit.test_side_file import side, trunk


def whole(path: Path, change: Callable[[Model], object] = lambda _: None) -> Path:
    """A model with its MTP block."""
    model = Model()
    change(model)
    return model.write(path)


def other_model(path: Path, change: Callable[[Model], object] = lambda _: None) -> Path:
    """A model without a block, of other weights' shapes and the same vocabulary."""
    model = Model()
    del model.hyper["nextn_predict_layers"]
    model.hyper |= {"block_count": 1, "feed_forward_length": 16}
    model.shapes = {
        name: shape
        for name, shape in model.shapes.items()
        if not name.startswith(("blk.1.", "blk.2."))
    }
    change(model)
    return model.write(path)


def lined_up(
    model: Path, draft: str = "auto", file: Path | None = None, is_fixed: bool = False
) -> DrafterSelection:
    return select_drafters(model_facts.read(model), DraftOptions(draft, file, is_fixed))


@pytest.mark.parametrize(
    ("text", "names"),
    [("auto", None), ("off", ()), ("mtp", ("mtp",)), ("ngram, mtp", ("ngram", "mtp"))],
)
def test_wishes_are_read(text: str, names: tuple[str, ...] | None) -> None:
    assert parse_drafters(text) == names


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("eagle", "'eagle' is not one of auto, off, ngram, mtp, dspark, model"),
        ("mtp,off", "'off' cannot be combined"),
        ("auto,ngram", "'auto' cannot be combined"),
        ("mtp,mtp", "names 'mtp' twice"),
        ("mtp,", "'' is not one of"),
        ("", "'' is not one of"),
        ("MTP", "'MTP' is not one of"),
    ],
)
def test_other_words_are_refused(text: str, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        parse_drafters(text)


def test_auto_takes_the_block_and_copies_beside_it(tmp_path: Path) -> None:
    found = lined_up(whole(tmp_path / "a.gguf"))
    assert found == DrafterSelection(("ngram", "mtp"))
    assert found.uses_own_block


def test_a_fixed_length_is_the_blocks_alone(tmp_path: Path) -> None:
    assert lined_up(whole(tmp_path / "a.gguf"), is_fixed=True).names == ("mtp",)
    assert lined_up(trunk(tmp_path / "b.gguf"), is_fixed=True).names == ("ngram",)


def test_a_model_without_a_block_copies(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert lined_up(trunk(tmp_path / "a.gguf")) == DrafterSelection(("ngram",))
    assert caplog.messages == ["drafting by n-gram lookup only: the file has no MTP block"]


def test_what_is_named_is_taken_in_its_order(tmp_path: Path) -> None:
    model = whole(tmp_path / "a.gguf")
    assert lined_up(model, "mtp,ngram").names == ("mtp", "ngram")
    assert lined_up(model, "ngram") == DrafterSelection(("ngram",))
    assert not lined_up(model, "ngram").uses_own_block
    assert lined_up(model, "off") == DrafterSelection()
    draft = other_model(tmp_path / "b.gguf")
    found = lined_up(model, "model,ngram,mtp", draft)
    assert found.names == ("model", "ngram", "mtp")
    assert found.uses_own_block
    assert found.model == model_facts.read(draft)


def test_what_is_named_and_cannot_be_is_an_error(tmp_path: Path) -> None:
    model = trunk(tmp_path / "a.gguf")
    with pytest.raises(UnsupportedModel, match=r"a.gguf cannot draft: the file has no MTP block"):
        lined_up(model, "ngram,mtp")
    with pytest.raises(RequestError, match=r"there is no draft model: name one with --draft-model"):
        lined_up(model, "model")
    draft = other_model(tmp_path / "b.gguf")
    with pytest.raises(RequestError, match=r"draft is 'ngram', which does not use .*b.gguf"):
        lined_up(model, "ngram", draft)
    with pytest.raises(UnsupportedModel, match="cannot draft for another file: the file has no"):
        lined_up(model, "mtp", draft)
    with pytest.raises(UnsupportedModel, match="cannot be a draft model: it holds only an MTP"):
        lined_up(model, "model", side(tmp_path / "mtp.gguf"))


def test_off_opens_no_other_file(tmp_path: Path) -> None:
    assert lined_up(trunk(tmp_path / "a.gguf"), "off", tmp_path / "missing") == DrafterSelection()


def test_the_header_tells_a_block_from_a_model(tmp_path: Path) -> None:
    model = trunk(tmp_path / "a.gguf")
    block = lined_up(model, "auto", side(tmp_path / "b.gguf"))
    assert block.side is not None
    assert (block.names, block.model) == (("ngram", "mtp"), None)
    draft = lined_up(model, "auto", other_model(tmp_path / "c.gguf"))
    assert draft.model is not None
    assert (draft.names, draft.side) == (("ngram", "model"), None)


def test_a_whole_file_is_a_block_of_its_own_model_and_a_model_to_others(tmp_path: Path) -> None:
    same = whole(tmp_path / "same.gguf")
    assert lined_up(trunk(tmp_path / "a.gguf"), "auto", same).names == ("ngram", "mtp")
    assert lined_up(other_model(tmp_path / "b.gguf"), "auto", same).names == ("ngram", "model")
    assert lined_up(trunk(tmp_path / "a.gguf"), "model", same).names == ("model",)


def test_a_block_that_would_abort_is_refused_unless_it_is_not_used(tmp_path: Path) -> None:
    model = whole(tmp_path / "a.gguf", lambda m: m.shapes.pop("blk.2.nextn.eh_proj.weight"))
    with pytest.raises(UnsupportedModel, match=r"use --draft off or --draft ngram to run"):
        lined_up(model)
    assert lined_up(model, "ngram").names == ("ngram",)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            lambda m: m.tokens.append("<more>"),
            "its vocabulary has 301 tokens, but the model's has 300",
        ),
        (
            lambda m: m.tokens.__setitem__(280, "<other>"),
            "its token 280 is '<other>', but the model's is '<w24>'",
        ),
        (
            lambda m: m.extra.update({"tokenizer.ggml.eos_token_id": 258}),
            "its eos token is 258, but the model's is 257",
        ),
        (
            lambda m: m.extra.update({"tokenizer.ggml.bos_token_id": 5}),
            "its bos token is 5, but the model's is 256",
        ),
        (
            lambda m: m.extra.update({"tokenizer.ggml.model": "llama"}),
            "its tokenizer is 'llama', but the model's is 'gpt2'",
        ),
    ],
)
def test_the_first_difference_of_the_vocabularies_is_named(
    tmp_path: Path, change: Callable[[Model], object], why: str
) -> None:
    def changed(model: Model) -> None:
        change(model)
        model.shapes["token_embd.weight"] = (32, len(model.tokens))
        model.shapes["output.weight"] = (32, len(model.tokens))
        model.extra.setdefault("tokenizer.ggml.token_type", [1] * len(model.tokens))

    draft = other_model(tmp_path / "draft.gguf", changed)
    with pytest.raises(UnsupportedModel) as error:
        lined_up(trunk(tmp_path / "a.gguf"), "auto", draft)
    assert str(error.value).endswith(f"cannot draft for {tmp_path / 'a.gguf'}: {why}")


def test_every_name_is_a_drafters() -> None:
    assert parse_drafters(",".join(DRAFTERS)) == tuple(DRAFTERS)
    assert parse_drafters(list(DRAFTERS)) == tuple(DRAFTERS)
