"""GBNF: what it says, and where what is no GBNF goes wrong."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable

import pytest

from gguf_mtp.errors import RequestError
from gguf_mtp.grammar.gbnf.lark import to_lark
from gguf_mtp.grammar.gbnf.nodes import Alternatives, Chars, Many, Node, Ref, Seq, Text
from gguf_mtp.grammar.gbnf.parser import MAX_RULES, Parser
from tests.support.words import CALL, END, SEP, STOP, grammars, may_follow

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


@pytest.mark.parametrize("tail", ["", " root?"])
def test_groups_may_lie_as_deep_as_generated_grammars_put_them(tail: str) -> None:
    gbnf = "root ::= " + "([0-9] " * 90 + '"x"' + ")?" * 90 + f' "!"{tail}'
    assert accepts(gbnf, "7" * 90 + "x!")
    assert accepts(gbnf, "!")
    assert not accepts(gbnf, "7" * 89 + "x!")


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


def matches(node: Node, rules: dict[str, Node], text: str, at: int) -> set[int]:
    """Where what `node` means may end in `text` if it begins at `at`, by definition."""
    match node:
        case Chars(_, ranges):
            inside = at < len(text) and any(a <= ord(text[at]) <= b for a, b in ranges)
            return {at + 1} if inside else set()
        case Text(literal):
            return {at + len(literal)} if text.startswith(literal, at) else set()
        case Ref(name, _):
            return matches(rules[name], rules, text, at)
        case Seq(nodes):
            ends = {at}
            for inner in nodes:
                ends = {end for start in ends for end in matches(inner, rules, text, start)}
            return ends
        case Alternatives(nodes):
            return {end for inner in nodes for end in matches(inner, rules, text, at)}
        case Many(inner, least, most):
            found, ends = set(), {at}
            for n in range((len(text) + 1 if most is None else most) + 1):
                found |= ends if n >= least else set()
                ends = {end for start in ends for end in matches(inner, rules, text, start)}
            return found
    raise AssertionError(node)


def random_part(rng: random.Random, depth: int) -> str:
    if not depth or rng.random() < 0.3:
        leaves = [
            '"a"',
            '"b"',
            '"ab"',
            '"ba"',
            '"aab"',
            "[ab]",
            "[^a]",
            "[^b(]",
            '"(" root',
            '"(" s',
        ]
        return rng.choice(leaves)
    inner = [random_part(rng, depth - 1) for _ in range(rng.randint(2, 3))]
    return rng.choice(
        [
            " ".join(inner),
            f"({' | '.join(inner)})",
            f"({inner[0]}){rng.choice(['*', '+', '?', '{2}', '{1,2}'])} {inner[1]}",
            f"{inner[0]} s",
        ]
    )


def test_random_grammars_mean_what_they_say() -> None:
    """Every text of up to four characters, in or out; some of the parts become terminals."""
    rng = random.Random(11)
    texts = ["".join(t) for n in range(5) for t in itertools.product("ab(", repeat=n)]
    n_terminals = n_members = n_endless = 0
    for _ in range(250):
        gbnf = f'root ::= {random_part(rng, 3)} | "(" root\ns ::= {random_part(rng, 2)} | "b(" s'
        rules = Parser(gbnf, GRAMMARS.token).rules()
        lark = to_lark(gbnf, GRAMMARS.token)
        n_terminals += "T0" in lark
        try:
            grammar = GRAMMARS.compile(lark)
        except RequestError:  # all its texts may be without end
            n_endless += 1
            continue
        for text in texts:
            follower = grammar.follow()
            follower.commit(list(text.encode()))
            accepted = follower.failure is None and bool(follower.allowed(())[END])
            assert accepted == (len(text) in matches(rules["root"], rules, text, 0)), (gbnf, text)
            n_members += accepted
    assert n_endless < 5
    assert n_terminals > 30
    assert n_members > 500


@pytest.mark.parametrize(
    ("string", "other", "is_whole"),
    [
        ('"<" ([^>\\\\] | "\\\\" [>\\\\])* ">"', '"["', True),
        ('"x" [a-w]* "y"', '"["', True),
        ('"x" [a-w]* "y"', '"x"', False),  # what begins alike
        ('"x" [a-w]* "y"', '("xy" | "[")', False),
        ('"x" [a-w]* "y"', "[^a]", False),
        ('"x" [a-z]*', '"["', False),  # could take more
        ('"x" [a-z]* "y"', '"["', False),
        ('"x" ("a" | "ab") "y"', '"["', False),  # two ways at one character
        ('"x" [a-w]{0,900} "y"', '"["', False),  # too large
    ],
)
def test_what_is_told_apart_is_a_terminal(string: str, other: str, is_whole: bool) -> None:
    gbnf = f'root ::= string | {other} root "]"\nstring ::= {string} ws\nws ::= " "*'
    terminals = [line for line in to_lark(gbnf, GRAMMARS.token).splitlines() if line[0] == "T"]
    first = '"x"' if "x" in string else '"<"'
    assert any(line.startswith(f"T0: ({first})") for line in terminals) is is_whole, terminals


@pytest.mark.parametrize(
    ("gbnf", "words"),
    [
        ("", "there is no rule called root"),
        ('a ::= "x"', "there is no rule called root"),
        ('root ::= "x"\n  b ::= y\nroot ::= b', "line 2, column 9: there is no rule called y"),
        ('root = "x"', "line 1, column 6: expected ::="),
        ("::= x", "line 1, column 1: expected the name of a rule"),
        ('root ::= "abc', "line 1, column 10: this literal or character class is not closed"),
        ("root ::= [abc", "line 1, column 10: this literal or character class is not closed"),
        ("root ::= []", "line 1, column 10: this character class is empty"),
        ("root ::= [z-a]", "line 1, column 14: the range ends before it begins: 'z' to 'a'"),
        ('root ::= ("a"', "line 1, column 10: this group is not closed"),
        ('root ::= "a")', "line 1, column 13: expected the end of the line"),
        ('root ::= "\\q"', "line 1, column 11: unknown escape \\q"),
        ('root ::= "\\x4"', "line 1, column 11: unknown escape \\x4"),
        ('root ::= "\\', "line 1, column 11: unknown escape \\"),
        ('root ::= "\\ud800"', "line 1, column 11: \\ud800 is not a character"),
        ('root ::= "a"{3,2}', "line 1, column 13: minimum of 3 repetitions exceeds maximum of 2"),
        ('root ::= "a"{99999}', "line 1, column 13: more than 2000 repetitions"),
        ('root ::= "a"{x}', "line 1, column 14: expected a number"),
        ('root ::= "a"{1', "line 1, column 15: expected }"),
        ("root ::= <nobody>", "line 1, column 10: the vocabulary has no token <nobody>"),
        ("root ::= <nobody", "line 1, column 10: expected a token"),
        ("root ::= " + "(" * 200, "line 1, column 111: more than 100 nested groups"),
        ('root ::= "a"' + "*" * 200, "line 1, column 24: more than 10 repetitions of one item"),
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


def _n_calls(work: Callable[[], object]) -> int:
    """How many Python functions `work` calls: the same on every machine."""
    n = 0

    def count(_frame: object, event: str, _arg: object) -> None:
        nonlocal n
        n += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return n


@pytest.mark.parametrize(
    "item",
    ["[a-z]* ", '"a" ', "[a-z] ", '("x" | "y") ', '[a-z]{0,9} "-" ', "([a-c] | [d-f]*)+ "],
)
def test_work_for_a_recursive_rule_is_bounded(item: str) -> None:
    """100 items took 10 to 30 s, and the time grew with the third power of their number."""

    def compile_(n: int) -> Callable[[], object]:
        return lambda: to_lark("root ::= " + item * n + "root?", GRAMMARS.token)

    few, many = _n_calls(compile_(100)), _n_calls(compile_(1000))
    assert few < 1_000_000
    assert many < 4_000_000


def _chain(n: int) -> str:
    rules = [f'r{i} ::= "a" r{i + 1}' for i in range(n)]
    return "\n".join(["root ::= r0", *rules, f'r{n} ::= "b"'])


def test_a_long_chain_of_rules_is_read_once_and_refused_where_it_would_end_the_process() -> None:
    """8,000 rules took 28 s, and then llguidance overflowed the stack."""
    longest = _chain(MAX_RULES - 2)
    assert _n_calls(lambda: to_lark(longest, GRAMMARS.token)) < 150 * MAX_RULES
    assert accepts(longest, "a" * (MAX_RULES - 2) + "b")
    source = _chain(8000)
    with pytest.raises(RequestError, match="has 8002 rules, but at most 1000"):
        to_lark(source, GRAMMARS.token)

    def refused() -> None:
        with pytest.raises(RequestError):
            to_lark(source, GRAMMARS.token)

    assert _n_calls(refused) < 1_200_000


def test_nested_repetitions_end_in_a_sentence() -> None:
    source = "root ::= " + "(" * 100 + '"a"' + (("*" * 10) + ")") * 100
    with pytest.raises(RequestError, match=r"line 1, column 10: this rule nests .* than 250 deep"):
        to_lark(source, GRAMMARS.token)
    deep = "root ::= " + '("a" | ' * 60 + '"b"' + ")*" * 60
    assert accepts(deep, "ab")
    assert accepts(deep + " root?", "ab")
