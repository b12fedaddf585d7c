"""Reasoning apart from the answer: the same parts, whatever the pieces."""

from __future__ import annotations

import random

import pytest

from gguf_mtp.chat.markers import Found, Seeker
from gguf_mtp.chat.reasoning import ReasoningParser, Split, is_open


def parse(text: str, is_open: bool, sizes: list[int]) -> tuple[Split, int | None, str]:
    """The parts of `text`, cut into pieces of `sizes`; where the content begins; all as it came."""
    parser = ReasoningParser(is_open)
    reasoning = content = ""
    pos = 0
    for size in [*sizes, len(text)]:
        part = parser.add(text[pos : pos + size])
        assert not (content and part.reasoning), "reasoning after content"
        reasoning, content, pos = reasoning + part.reasoning, content + part.content, pos + size
    last = parser.finish()
    return Split(reasoning + last.reasoning, content + last.content), parser.end, text


CASES = [
    # the prompt opened the reasoning: R1, V3.1 with thinking
    ("I see.\n</think>\n\nParis.", True, Split("I see.", "Paris.")),
    ("\nI see.</think>Paris.", True, Split("I see.", "Paris.")),
    ("</think>Paris.", True, Split("", "Paris.")),
    ("\n\n</think>\n\nParis.", True, Split("", "Paris.")),
    ("<think>\nI see.</think>Paris.", True, Split("I see.", "Paris.")),  # opened twice
    ("a < b, </thin air", True, Split("a < b, </thin air", "")),
    ("Cut by max_tok", True, Split("Cut by max_tok", "")),
    ("Cut in the tag </thi", True, Split("Cut in the tag </thi", "")),
    ("<thi", True, Split("<thi", "")),
    ("Two\n\n</b>\n x </think> y </think> z", True, Split("Two\n\n</b>\n x", "y </think> z")),
    # it did not: the text opens it, or has none
    ("<think>\nI see.\n</think>\n\nParis.\n", False, Split("I see.", "Paris.\n")),
    (" \n<think>I see.</think>Paris.", False, Split("I see.", "Paris.")),
    ("Paris.", False, Split("", "Paris.")),
    ("\n Paris, <think> is a tag", False, Split("", "\n Paris, <think> is a tag")),
    ("<thin ice", False, Split("", "<thin ice")),
    ("<thi", False, Split("", "<thi")),
    ("", False, Split("", "")),
    ("", True, Split("", "")),
    ("\n", False, Split("", "\n")),
]


@pytest.mark.parametrize(("text", "opened", "expected"), CASES)
def test_parts_do_not_depend_on_the_pieces(text: str, opened: bool, expected: Split) -> None:
    rng = random.Random(1)
    pieces = [[len(text)], [1] * len(text)]
    pieces += [[rng.randint(1, 6) for _ in text] for _ in range(20)]
    for sizes in pieces:
        parts, end, _ = parse(text, opened, sizes)
        assert parts == expected
        if "</think>" in text and parts.content and (opened or "<think>" in text.lstrip()[:7]):
            assert end == text.index("</think>") + len("</think>")


def test_text_is_given_out_as_soon_as_it_is_certain() -> None:
    parser = ReasoningParser(is_open=True)
    assert parser.add("I see a <") == Split("I see a")
    assert parser.add("b> tag. ") == Split(" <b> tag.")
    assert parser.add("Now </think") == Split(" Now")
    assert parser.add(">\n\nParis") == Split("", "Paris")
    assert parser.add(" it is.") == Split("", " it is.")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("<｜User｜>Hi<｜Assistant｜><think>\n", True),  # R1
        ("<｜User｜>Hi<｜Assistant｜><think>", True),  # V3.1 with thinking
        ("<｜User｜>Hi<｜Assistant｜><think></think>", False),  # V3.1 without
        ("<｜User｜>Hi<｜Assistant｜></think>", False),
        ("<｜User｜>What is <think>?<｜Assistant｜>", False),
        ("", False),
    ],
)
def test_the_prompt_says_whether_reasoning_is_open(prompt: str, expected: bool) -> None:
    assert is_open(prompt) is expected


def test_a_seeker_holds_back_no_more_than_it_must() -> None:
    seeker = Seeker("<end>", "<stop>")
    assert seeker.add("a <e") == Found("a ")
    assert seeker.add("xit> <<st") == Found("<exit> <")
    assert seeker.add("op>b") == Found("", "<stop>", "b")
    assert Seeker("aab").add("aaab") == Found("a", "aab", "")
    held = Seeker("<end>")
    assert held.add("x<en") == Found("x")
    assert held.finish() == "<en"
