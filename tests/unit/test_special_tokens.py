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
    ("text", "parts"),
    [
        ("｜D｜D｜", [1, "D｜"]),  # the first of its kind
        ("xabcd", ["x", 3]),  # the longest, though another begins before it
        ("xabc", [2, "c"]),
        ("abxabcd", ["abx", 3]),
        ("<|im_end|>|>", [5, 4]),  # one within another
        ("xab|>", [2, 4]),
        ("abab", [6]),  # both begin with ab
        ("ab", [7]),
        ("abaxab", [7, "a", 2]),
    ],
)
def test_of_those_that_overlap_the_longest_is_taken(text: str, parts: list[int | str]) -> None:
    texts = {1: "｜D｜", 2: "xab", 3: "abcd", 4: "|>", 5: "<|im_end|>", 6: "abab", 7: "ab"}
    if text == "abxabcd":
        del texts[7]
    tokens = [SpecialToken(i, marker, is_control=True) for i, marker in texts.items()]
    assert SpecialTokens(tokens).split(text, with_control=True) == parts


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
