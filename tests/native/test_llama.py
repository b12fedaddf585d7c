"""The only module that touches llama.cpp: what it promises on the real library."""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import mmap
from collections.abc import Iterator

import llama_cpp
import numpy as np
import pytest

import gguf_mtp
from gguf_mtp.demo import demo_model
from gguf_mtp.errors import DecodeError, LoadFailed, SavedStateError, UnsupportedModel
from gguf_mtp.llama import Context, ContextOptions, Model, ModelOptions, rpc
from gguf_mtp.llama import log as llama_log
from gguf_mtp.types import Rows

pytestmark = pytest.mark.native

OPTIONS = ContextOptions(n_ctx=256, n_seq=2, n_batch=16, n_outputs=8, n_threads=1, strict=True)
TOKENS = [0, 4083, 57, 284, 283]


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with Model(str(demo_model(kind="f32")), ModelOptions(load_mtp=True)) as model:
        yield model


@pytest.fixture
def context(model: Model) -> Iterator[Context]:
    context = model.context(dataclasses.replace(OPTIONS, hidden=True))
    yield context
    context.close()


def logits(context: Context, rows: Rows) -> np.ndarray:
    return context.decode([rows]).outputs[0].logits.copy()


def test_outputs_belong_to_their_rows(context: Context) -> None:
    """Rows of two sequences in one batch: each gets the logits and hidden rows it gets alone."""
    step = context.decode([Rows(0, 0, TOKENS, 2), Rows(1, 0, TOKENS[:3], 1)])
    both = [(o.logits.copy(), o.hidden.copy()) for o in step.outputs if o.hidden is not None]
    assert [o.logits.shape for o in step.outputs] == [(2, 4096), (1, 4096)]
    for seq, tokens, n in ((0, TOKENS, 2), (1, TOKENS[:3], 1)):
        context.rewind(seq, 0)
        alone = context.decode([Rows(seq, 0, tokens, n)]).outputs[0]
        assert alone.hidden is not None
        np.testing.assert_allclose(both[seq][0], alone.logits, atol=1e-4)
        np.testing.assert_allclose(both[seq][1], alone.hidden, atol=1e-4)
        assert np.isfinite(alone.hidden).all()
        assert np.ptp(alone.hidden) > 0.1


def test_a_batch_without_outputs(context: Context) -> None:
    output = context.decode([Rows(0, 0, TOKENS)]).outputs[0]
    assert output.logits.shape == (0, 4096)
    assert output.hidden is not None
    assert output.hidden.shape == (5, 256)


def test_rewinding_forgets(context: Context) -> None:
    first = logits(context, Rows(0, 0, TOKENS, 1))
    context.decode([Rows(0, 5, [700, 800], 0)])
    assert context.n_past(0) == 7
    context.rewind(0, 4)
    context.rewind(0, 6)  # nothing to drop
    assert context.n_past(0) == 4
    np.testing.assert_allclose(logits(context, Rows(0, 4, TOKENS[4:], 1)), first, atol=1e-4)


def test_a_copied_beginning_is_the_same_beginning(context: Context) -> None:
    first = logits(context, Rows(0, 0, TOKENS, 1))
    context.decode([Rows(1, 0, [9, 9, 9])])
    context.copy(0, 1, 4)
    assert context.n_past(1) == 4
    np.testing.assert_allclose(logits(context, Rows(1, 4, TOKENS[4:], 1)), first, atol=1e-4)


def test_saved_rows_come_back(context: Context) -> None:
    context.decode([Rows(0, 0, TOKENS[:4])])
    data = context.save(0)
    first = logits(context, Rows(0, 4, TOKENS[4:], 1))
    assert context.load(1, data) == 4
    np.testing.assert_allclose(logits(context, Rows(1, 4, TOKENS[4:], 1)), first, atol=1e-4)
    with pytest.raises(SavedStateError):
        context.load(1, data[:8] + b"\xff" * (len(data) - 8))
    assert context.n_past(1) == 0
    np.testing.assert_allclose(logits(context, Rows(1, 0, TOKENS, 1)), first, atol=1e-4)


@pytest.mark.parametrize("code", [1, 2, -1, -2, -3])
def test_every_failure_leaves_the_cache_as_it_was(
    code: int, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes 2, -2 and -3 may come after some rows were stored; here all were."""
    decode = llama_cpp.llama_decode
    context.decode([Rows(0, 0, TOKENS[:2])])

    def fail(ctx: object, batch: object) -> int:
        decode(ctx, batch)
        return code

    monkeypatch.setattr(llama_cpp, "llama_decode", fail)
    with pytest.raises(DecodeError, match=f"returned {code}") as error:
        context.decode([Rows(0, 2, [5, 6, 7], 1), Rows(1, 0, [8], 1)])
    assert error.value.code == code
    monkeypatch.undo()
    assert (context.n_past(0), context.n_past(1)) == (2, 0)
    after = logits(context, Rows(0, 2, TOKENS[2:], 1))
    context.rewind(0, 0)
    np.testing.assert_allclose(after, logits(context, Rows(0, 0, TOKENS, 1)), atol=1e-4)


def test_a_full_cache_is_code_1(model: Model) -> None:
    context = model.context(dataclasses.replace(OPTIONS, n_batch=256))
    context.decode([Rows(0, 0, [7] * 200)])
    with pytest.raises(DecodeError) as error:
        context.decode([Rows(1, 0, [7] * 100)])
    assert error.value.code == 1
    assert context.n_past(1) == 0
    context.rewind(0, 50)
    context.decode([Rows(1, 0, [7] * 100)])
    context.close()


def test_a_missing_buffer_is_an_error(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = ctypes.POINTER(ctypes.c_float)()
    monkeypatch.setattr(llama_cpp, "llama_get_logits", lambda _: nothing)
    with pytest.raises(DecodeError, match="no buffer"):
        context.decode([Rows(0, 0, TOKENS, 1)])


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        ([], "0 rows"),
        ([Rows(0, 0, [1] * 17)], "17 rows"),
        ([Rows(0, 0, [1] * 9, 9)], "logits of 9 rows"),
        ([Rows(0, 3, [1])], "ends at position 0, but its rows begin at 3"),
        ([Rows(0, 1, [1])], "begin at 1"),
        ([Rows(2, 0, [1])], "sequence 2"),
        ([Rows(0, 0, [1]), Rows(0, 1, [1])], "twice"),
        ([Rows(0, 0, [1], 0, np.zeros((1, 256), np.float32))], "hidden"),
    ],
)
def test_what_would_abort_the_process_is_refused(
    rows: list[Rows], what: str, context: Context
) -> None:
    with pytest.raises(DecodeError, match=what):
        context.decode(rows)


def test_a_token_outside_the_vocabulary_is_refused(context: Context) -> None:
    with pytest.raises(DecodeError):
        context.decode([Rows(0, 0, [4096])])
    assert context.n_past(0) == 0


def test_mtp_rows_begin_at_position_one(model: Model) -> None:
    context = model.context(dataclasses.replace(OPTIONS, is_mtp=True))
    hidden = np.ones((2, 256), np.float32)
    output = context.decode([Rows(0, 1, TOKENS[1:3], 1, hidden)]).outputs[0]
    assert output.hidden is not None
    assert output.hidden.shape == (2, 256)
    assert context.n_past(0) == 3
    with pytest.raises(DecodeError, match="hidden"):
        context.decode([Rows(0, 3, TOKENS[3:4], 1)])
    context.close()


def test_a_block_that_was_not_loaded_makes_no_context() -> None:
    with (
        Model(str(demo_model())) as plain,
        pytest.raises(UnsupportedModel, match="MTP"),
    ):
        plain.context(dataclasses.replace(OPTIONS, is_mtp=True))


def test_no_memory_for_a_context_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_cpp, "llama_init_from_model", lambda *_: None)
    with pytest.raises(LoadFailed, match=r"create a context of 512 cells.*needs [\d.]+ MB"):
        gguf_mtp.load(demo_model(), gguf_mtp.LoadOptions(n_ctx=512))


def test_another_binding_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_cpp, "__version__", "0.4.0")
    with pytest.raises(LoadFailed, match=r"0\.4\.0 is installed.*needs 0\.3\.36"):
        Model(str(demo_model()))


def test_a_missing_export_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from llama_cpp import llama_cpp_ext

    monkeypatch.delattr(llama_cpp_ext, "llama_get_embeddings_nextn")
    with (
        Model(str(demo_model()), ModelOptions(load_mtp=True)) as model,
        pytest.raises(LoadFailed, match="lacks llama_get_embeddings_nextn"),
    ):
        model.context(dataclasses.replace(OPTIONS, hidden=True))


def test_text_to_tokens_and_back(model: Model) -> None:
    vocab = model.vocab
    text = "The capital of Côte d'Ivoire 你好 🙂\n"
    tokens = vocab.tokenize(text, add_special=False)
    assert b"".join(map(vocab.piece, tokens)).decode() == text
    assert vocab.tokenize("", add_special=True) == [0]
    assert vocab.tokenize("<｜User｜>x", add_special=False)[0] == 4083
    assert vocab.tokenize("<｜User｜>x", add_special=False, parse_special=False)[0] != 4083
    assert vocab.piece(0) == b""  # a control token stands for no text
    assert vocab.end_tokens == {1}
    assert len(vocab.tokenize("word " * 5000, add_special=False)) >= 5000


def test_broken_utf8_in_the_log_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "gguf_mtp.llama"):
        llama_log.forward_log(4, b"piece \xe4\xbd\n", None)
    assert caplog.messages == ["piece \ufffd"]


def test_this_process_holds_what_it_touches() -> None:
    before = rpc.resident()
    block = mmap.mmap(-1, 64 << 20)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # the kernel counts pages in batches of 64
        block.madvise(mmap.MADV_NOHUGEPAGE)
    for at in range(0, len(block), mmap.PAGESIZE):
        block[at] = 1
    assert 60 << 20 < rpc.resident() - before < 70 << 20
    assert len(block) == 64 << 20
