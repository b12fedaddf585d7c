"""Texts over which llama.cpp's tokenizer would end the process."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from gguf_mtp.deep_stack import with_stack
from gguf_mtp.demo import demo_model
from gguf_mtp.errors import RequestError
from gguf_mtp.llama.recursion_depth import deepest
from gguf_mtp.llama.vocab import DEEPEST
from gguf_mtp.loading.loader import LoadOptions, load
from gguf_mtp.session import Session


@pytest.mark.parametrize(
    ("text", "n"),
    [
        ("", 0),
        ("ab cd, 12345 ef", 5),
        ("ab. 中文，中文\n", 6),
        ("x\n \t\n y", 5),
        ("--—…!! a", 6),
        ("1234567a", 7),
        ("a1" * 50, 1),
    ],
)
def test_no_match_is_longer_than_a_run_of_one_kind(text: str, n: int) -> None:
    assert deepest(text) == n


def test_a_deep_call_gives_back_what_it_returns_or_raises() -> None:
    before = threading.stack_size()

    def down(n: int) -> int:
        return n and 1 + down(n - 1)

    limit = sys.getrecursionlimit()
    assert with_stack(1 << 26, lambda: down(limit // 2)) == limit // 2
    with pytest.raises(ZeroDivisionError):
        with_stack(1 << 20, lambda: 1 // 0)
    with pytest.raises(RequestError, match="cannot allocate a stack of"):
        with_stack(1 << 46, lambda: 1)
    assert threading.stack_size() == before


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with load(demo_model(), LoadOptions(n_ctx=256, n_threads=1, draft="off")) as loaded:
        yield loaded


@pytest.mark.native
@pytest.mark.parametrize("unit", ["a", " ", "=", "\n", "中", "é", "1", "\0"])
def test_long_runs_are_tokens_as_short_ones_are(session: Session, unit: str) -> None:
    """50,000 of them, in a request that anybody may send, were the end of a server."""
    vocab = session.vocab
    text = unit * DEEPEST
    tokens = vocab.tokenize(text, add_special=False)
    assert b"".join(map(vocab.piece, tokens)).decode() == text
    with pytest.raises(RequestError, match=f"has {DEEPEST + 1} characters of one kind in a row"):
        vocab.tokenize(text + unit, add_special=False)


@pytest.mark.native
def test_the_length_of_a_text_does_not_change_its_tokens(session: Session) -> None:
    vocab = session.vocab
    line = "The capital of France is Paris; it has 2,102,650 inhabitants.\n\n  def f(x):\n"
    one = vocab.tokenize(line, add_special=False)
    for n in (20, 2_000, 10_000):
        assert vocab.tokenize(line * n, add_special=False) == one * n
