"""GBNF: what it says, and where what is no GBNF goes wrong."""

from __future__ import annotations

import random

import pytest

from gguf_mtp.errors import RequestError
from gguf_mtp.gbnf_lark import to_lark
from tests.words import CALL, END, SEP, STOP, grammars, may_follow

GRAMMARS = grammars()


def accepts(gbnf: str, text: str) -> bool:
    """Whether `text` is a member, byte by byte and by its end."""
    follower = GRAMMARS.compile(to_lark(gbnf, GRAMMARS.token)).follow()
    follower.commit(list(text.encode()))
    return follower.failure is None and bool(follower.allowed(())[END])


@pytest.mark.parametrize(
    ("gbnf", "members", "others"),
    [
        ('root ::= "a" "b"* # a comment\n\n', ["a", "abb"], ["", "b", "aa"]),
        ('root ::= [^a-c\\]] | "\\x41\\u00e9"', ["d", "日", "Aé"], ["a", "]", "Ae"]),
        ("root ::= [-x] [x-] [a\\-c]", ["-x-", "xxa", "--c"], ["yxa", "xxb"]),
        ('root ::= . ("\\n" | "\\"")?', ["a", "\n", "日\n", 'x"'], ["", "ab"]),
        ('root ::= (\n "a"\n | b\n)+\nb ::= "b" |\n  "c"', ["a", "bc", "cab"], ["", "d"]),
        ('root ::= "a"{2} "b"{1,} "c"{0,2}', ["aab", "aabbbcc"], ["ab", "aa", "aabccc"]),
        ('root ::= "x" a-b?\na-b ::= "y"', ["x", "xy"], ["y"]),
        ('root ::= "" | "(" root ")"', ["", "()", "((()))"], ["(", "(()", ")"]),
        ('root ::= w "b" "!"\nw ::= [a-c]+', ["ab!", "bb!", "abcb!"], ["b!", "abc!"]),
        ('root ::= s | s "+" root\ns ::= [a-z]* "th"', ["th", "thth", "ath+th"], ["t", "th+"]),
    ],
)
def test_what_it_says(gbnf: str, members: list[str], others: list[str]) -> None:
    assert [text for text in members if not accepts(gbnf, text)] == []
    assert [text for text in others if accepts(gbnf, text)] == []


@pytest.mark.parametrize("tail", ["", '\nroot ::= "x" root | t\nt ::= ("ab" | "abc")'])
def test_words_of_several_characters_are_met_by_any_tokens(tail: str) -> None:
    """Without recursion the grammar is one terminal, with it characters: both are exact."""
    gbnf = tail.strip() or 'root ::= "x" ("ab" | "abc") | "ab" | "abc"'
    follower = GRAMMARS.compile(to_lark(gbnf, GRAMMARS.token)).follow()
    language = ["x" * n + word for n in range(5) for word in ("ab", "abc")]
    if not tail:
        language = [w for w in language if not w.startswith("xx")]
    found = {int(i) for i in follower.allowed(()).nonzero()[0]}
    assert found == may_follow(b"", language)
    follower.commit([257])
    found = {int(i) for i in follower.allowed(()).nonzero()[0]}
    assert found == {ord("c"), END, STOP}


def test_tokens_by_name_by_number_and_any_other() -> None:
    gbnf = f'root ::= <call> "ab" <[{SEP}]> !<call> "c"'
    follower = GRAMMARS.compile(to_lark(gbnf, GRAMMARS.token)).follow()
    assert list(follower.allowed(()).nonzero()[0]) == [CALL]
    follower.commit([CALL, 257])
    assert list(follower.allowed(()).nonzero()[0]) == [SEP]
    follower.commit([SEP])
    others = follower.allowed(())
    assert not others[CALL]
    assert others[SEP]
    follower.commit([65])
    assert list(follower.allowed(()).nonzero()[0]) == [ord("c")]


@pytest.mark.parametrize(
    ("gbnf", "words"),
    [
        ("", "there is no rule called root"),
        ('a ::= "x"', "there is no rule called root"),
        ('root ::= "x"\n  b ::= y\nroot ::= b', "line 2, column 9: there is no rule called y"),
        ('root = "x"', "line 1, column 6: expected ::="),
        ("::= x", "line 1, column 1: expected the name of a rule"),
        ('root ::= "abc', "line 1, column 10: this is not closed"),
        ("root ::= [abc", "line 1, column 10: this is not closed"),
        ("root ::= []", "line 1, column 10: no character is in this class"),
        ("root ::= [z-a]", "line 1, column 14: the range ends before it begins: 'z' to 'a'"),
        ('root ::= ("a"', "line 1, column 10: this group is not closed"),
        ('root ::= "a")', "line 1, column 13: expected the end of the line"),
        ('root ::= "\\q"', "line 1, column 11: unknown escape \\q"),
        ('root ::= "\\x4"', "line 1, column 11: unknown escape \\x4"),
        ('root ::= "\\', "line 1, column 11: unknown escape \\"),
        ('root ::= "\\ud800"', "line 1, column 11: \\ud800 is no character"),
        ('root ::= "a"{3,2}', "line 1, column 13: at least 3 and at most 2 repetitions"),
        ('root ::= "a"{99999}', "line 1, column 13: more than 2000 repetitions"),
        ('root ::= "a"{x}', "line 1, column 14: expected a number"),
        ('root ::= "a"{1', "line 1, column 15: expected }"),
        ("root ::= <nobody>", "line 1, column 10: the vocabulary has no token <nobody>"),
        ("root ::= <nobody", "line 1, column 10: expected a token"),
        ("root ::= " + "(" * 200, "line 1, column 111: more than 100 nested groups"),
        ('root ::= "a"' + "*" * 200, "line 1, column 113: more than 100 repetitions of one item"),
    ],
)
def test_what_is_no_gbnf_says_where(gbnf: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        to_lark(gbnf, GRAMMARS.token)
    assert str(caught.value).startswith(words)


def test_no_text_makes_anything_but_a_grammar_or_a_refusal() -> None:
    rng = random.Random(4)
    parts = ["root", "::=", '"a"', "[a-z]", "|", "(", ")", "*", "{", "2", ",", "}", "\n", "\\", '"']
    parts += [
        "#",
        "<",
        ">",
        "!",
        "[",
        "]",
        "^",
        ".",
        "-",
        "é",
        "\x00",
        " ",
        "a",
        "::= ",
        "root ::= ",
    ]
    n_good = 0
    for _ in range(3_000):
        text = "root ::= " + "".join(rng.choices(parts, k=rng.randint(0, 9)))
        try:
            to_lark(text, GRAMMARS.token)
            n_good += 1
        except RequestError:
            continue
    assert n_good > 100
