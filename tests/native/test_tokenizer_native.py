"""Tokens come out as llama.cpp's own, however they were found."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from gguf_mtp.demo import demo_model
from gguf_mtp.errors import ContextFull
from gguf_mtp.llama import Model
from gguf_mtp.llama.vocab import Vocab
from tests.support.gguf_files import Model as Tiny

pytestmark = pytest.mark.native

ROOT = Path(__file__).parents[2]
LETTERS = [*"aZ 7一丁中あ。,.\n\r\t  é🙂½²٣<|>", "  ", "\n\n", "don't", "123", "你好", "\ud800"]
MARKERS = ["<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<think>", "</think>"]
N_TEXTS = 3000


@pytest.fixture(scope="module")
def vocab() -> Iterator[Vocab]:
    with Model(str(demo_model())) as model:
        yield model.vocab


def texts(n: int) -> Iterator[str]:
    """Cuts of documents and code, letters of all kinds at their ends, markers between."""
    documents = [
        (ROOT / name).read_text(encoding="utf-8")
        for name in ("README.md", "docs/ARCHITECTURE.md", "gguf_mtp/engine/engine.py")
    ]
    rng = random.Random(1)
    for _ in range(n):
        parts = []
        for _ in range(rng.randrange(8)):
            document = rng.choice(documents)
            start = rng.randrange(len(document))
            parts += [document[start : start + rng.randrange(80)], *rng.choices(LETTERS, k=3)]
            parts.append(rng.choice(MARKERS) if rng.random() < 0.7 else "")
        yield "".join(parts)


def forget(vocab: Vocab) -> None:
    vars(vocab).pop("_tokenizer", None)


def test_ids_are_llama_cpps_own(vocab: Vocab) -> None:
    """What was tokenised before, what is new, and both in one text."""
    rng = random.Random(2)
    for text in texts(N_TEXTS):
        add_special, parse_special = rng.random() < 0.5, rng.random() < 0.7
        if rng.random() < 0.2:
            forget(vocab)
        clean = text.encode(errors="replace").decode()
        expected = vocab._tokenize(clean, add_special, parse_special)
        assert vocab.tokenize(text, add_special, parse_special) == expected, repr(text)


def test_pieces_are_tokenised_together_and_remembered(
    vocab: Vocab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten thousand messages in some calls of llama.cpp, and in none the second time."""
    turns = [f"<｜User｜>question {i}?<｜Assistant｜>answer {i}" for i in range(5000)]
    expected = vocab._tokenize("".join(turns[:50]), add_special=False, parse_special=True)
    calls = []
    own = vocab._ids
    monkeypatch.setattr(vocab, "_ids", lambda text, *how: calls.append(text) or own(text, *how))
    ids = vocab.tokenize("".join(turns), add_special=False)
    assert len(calls) < 200
    assert ids[: len(expected)] == expected
    calls.clear()
    assert vocab.tokenize("".join(turns), add_special=False) == ids
    assert calls == []


def test_what_was_used_longest_ago_is_forgotten(
    vocab: Vocab, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget(vocab)
    tokenizer = vocab._tokenizer
    monkeypatch.setattr("gguf_mtp.llama.tokenizer.MOST_KEPT", 300)
    for i in range(100):
        vocab.tokenize(f"text number {i:03}", add_special=False)
        vocab.tokenize("used again and again", add_special=False)
    assert "used again and again" in tokenizer._known
    assert "text number 000" not in tokenizer._known
    assert sum(map(len, tokenizer._known)) == tokenizer._n_chars <= 300


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenised(
    vocab: Vocab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> list[int]:
        raise AssertionError("tokenised")

    longest = vocab._longest
    monkeypatch.setattr(vocab, "_ids", never)
    with pytest.raises(ContextFull, match="the prompt has at least 50000 tokens") as caught:
        vocab.prompt_tokens("<｜User｜>" * 50_000, add_special=True, most=2048, guard="")
    assert caught.value.n_prompt == 50_000
    n_bytes = 2048 * longest + 1
    with pytest.raises(ContextFull, match="at least 2049 tokens"):
        vocab.prompt_tokens("é" * (n_bytes // 2 + 1), add_special=True, most=2048, guard="")
    with pytest.raises(AssertionError, match="tokenised"):  # it might fit
        vocab.prompt_tokens("x" * (n_bytes - 1), add_special=True, most=2048, guard="")


def test_a_guarded_marker_is_text(vocab: Vocab) -> None:
    text = "say <｜Assistant｜> and <think>"
    guarded = vocab.guarded(text, "\ue000")
    ids = vocab.prompt_tokens(f"<｜User｜>{guarded}", add_special=False, most=99, guard="\ue000")
    plain = vocab._tokenize(text, add_special=False, parse_special=False)
    assert ids == [*vocab.tokenize("<｜User｜>", add_special=False), *plain]
    assert b"".join(map(vocab.piece, ids)).decode() == text


def test_markers_that_overlap_are_found_as_by_llama_cpp(tmp_path: Path) -> None:
    """As DeepSeek-V4's do, whose ｜DSML｜ begins with what it ends with."""
    tiny, markers = Tiny(), ["<ab", "b｜c>", "｜D｜", "ab", "|>", "<|ab|>"]
    kinds = [3, 4, 4, 3, 4, 3]
    tiny.tokens[258:264] = markers
    types = dict(zip(range(258, 264), kinds, strict=True))
    tiny.extra["tokenizer.ggml.token_type"] = [types.get(i, 1) for i in range(300)]
    rng = random.Random(3)
    with Model(str(tiny.write(tmp_path / "m.gguf"))) as model:
        vocab = model.vocab
        for _ in range(2000):
            text = "".join(rng.choices([*markers, *"<ab｜Dc|> x"], k=rng.randrange(12)))
            for parse_special in (True, False):
                expected = vocab._tokenize(text, False, parse_special)
                assert vocab.tokenize(text, False, parse_special) == expected, text
        guarded = vocab.guarded("<ab x", "!")
        plain = vocab._tokenize("<ab x", False, False)
        assert vocab.prompt_tokens(guarded, add_special=False, most=9, guard="!") == plain
