"""Special tokens in a text, found as llama.cpp finds them."""

from __future__ import annotations

import random

import pytest

from gguf_mtp.llama.special_tokens import SpecialToken, SpecialTokens

TOKENS = SpecialTokens(
    [
        SpecialToken(1, "<a>", is_control=True),
        SpecialToken(2, "<a>b", is_control=True),
        SpecialToken(3, "<think>", is_control=False),
        SpecialToken(4, "", is_control=True),
        SpecialToken(5, "(.*)", is_control=True),
    ]
)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", []),
        ("x", ["x"]),
        ("<a>", [1]),
        ("x<a>y<a><a>b", ["x", 1, "y", 1, 2]),  # the longest wins
        ("<a<a>", ["<a", 1]),
        ("<think>(.*)(x)", [3, 5, "(x)"]),
    ],
)
def test_a_text_is_split_at_them(text: str, parts: list[int | str]) -> None:
    assert TOKENS.split(text, with_control=True) == parts


def test_without_control_tokens_the_others_are_still_read() -> None:
    assert TOKENS.split("<a><think>(.*)", with_control=False) == ["<a>", 3, "(.*)"]


def test_white_space_belongs_to_some() -> None:
    tokens = SpecialTokens(
        [
            SpecialToken(1, "<l>", is_control=True, strips_left=True),
            SpecialToken(2, "<r>", is_control=True, strips_right=True),
        ]
    )
    assert tokens.split(" a \n<l> b <r>\t c ", with_control=True) == [" a", 1, " b ", 2, "c "]
    assert tokens.split("<r> \n<l>", with_control=True) == [2, 1]


def test_there_may_be_none() -> None:
    assert SpecialTokens([]).split("<a>", with_control=True) == ["<a>"]
    assert SpecialTokens([]).split("", with_control=True) == []
    assert SpecialTokens([]).guarded("<a>", "!") == "<a>"


@pytest.mark.parametrize(
    ("texts", "overlap"),
    [
        (["<a>", "<b>"], False),
        (["<a>", "<a>b"], False),  # one begins the other: the longer is taken
        (["xab", "abc"], True),
        (["aa"], True),  # within aaa
        (["<|im_start|>", "|>"], False),  # the longer is found first, by both
    ],
)
def test_those_that_overlap_are_known(texts: list[str], overlap: bool) -> None:
    tokens = [SpecialToken(i, text, is_control=True) for i, text in enumerate(texts)]
    assert SpecialTokens(tokens).overlap is overlap


def test_a_guard_breaks_control_tokens_only() -> None:
    assert TOKENS.guarded("x<a>b <think> <a>", "!") == "x<!a>b <think> <!a>"
    assert TOKENS.guarded("<a> (.*)", "!", but=("<a>",)) == "<a> (!.*)"
    assert TOKENS.split(TOKENS.guarded("<a>b", "!"), with_control=True) == ["<!a>b"]


def test_many_are_found_as_fast_as_few() -> None:
    """A thousand markers, and a text of nothing else: each is one look-up, not a thousand."""
    tokens = SpecialTokens(
        SpecialToken(i, f"<｜place▁holder▁no▁{i}｜>", is_control=True) for i in range(1000)
    )
    rng = random.Random(1)
    ids = [rng.randrange(1000) for _ in range(5000)]
    text = "".join(f"<｜place▁holder▁no▁{i}｜>" for i in ids)
    assert tokens.split(text, with_control=True) == ids
