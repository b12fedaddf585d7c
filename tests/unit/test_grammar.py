"""Grammars: exactly the tokens that keep the text in the language, on committed tokens only."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from gguf_mtp.errors import RequestError
from gguf_mtp.grammar.json_schema import compile_schema
from gguf_mtp.grammar.matching import quoted
from gguf_mtp.params import SamplingParams
from gguf_mtp.sampling.chain import SamplingChain
from gguf_mtp.sampling.verify import verify
from gguf_mtp.types import Draft
from tests.support.sampled_laws import excess
from tests.support.words import (
    CALL,
    END,
    N_VOCAB,
    SEP,
    STOP,
    WordVocab,
    allowed,
    grammars,
    may_follow,
    text,
)

GRAMMARS = grammars()
VOCAB = WordVocab()


# -- the mask ----------------------------------------------------------------------------------

LANGUAGE = ["abx", "abcx}", "ab12", "é日本", '{"ab":12}', "null", "nulltrue", "</ab", "\n\nab"]


@pytest.mark.parametrize("drafts", [False, True])
def test_the_mask_is_every_token_that_keeps_the_text_in_the_language(drafts: bool) -> None:
    """Tokens that span parts of the grammar, and parts of characters, among them."""
    grammar = GRAMMARS.compile(f"start: T\nT: {' | '.join(map(quoted, LANGUAGE))}")
    rng = random.Random(1)
    seen = set()
    for _ in range(60):
        follower, tokens = grammar.follow(), []
        while True:
            found = allowed(follower, tokens if drafts else ())
            assert found == may_follow(text(tokens), LANGUAGE), text(tokens)
            token = rng.choice(sorted(found))
            if token in (END, STOP):
                break
            tokens.append(token)
            if not drafts:
                follower.commit([token])
        seen.add(text(tokens).decode())
    assert seen == set(LANGUAGE)


def test_only_end_tokens_are_left_once_the_text_is_complete() -> None:
    follower = GRAMMARS.compile('start: "ab" "c"?').follow()
    assert allowed(follower) == {ord("a"), 257, 258}  # 257: ab, 258: abc
    assert allowed(follower, [257]) == {ord("c"), END, STOP}
    assert allowed(follower, [257, END]) == {END, STOP}  # it could have gone on before
    follower.commit([258])
    assert allowed(follower) == {END, STOP}
    assert allowed(follower, [END]) == {END, STOP}
    assert allowed(follower, [END, 65, 66]) == {END, STOP}
    follower.commit([END])
    assert follower.failure is None


def test_control_tokens_are_no_text_and_come_only_where_they_are_named() -> None:
    anything = GRAMMARS.compile("start: /(?s:.)*/").follow()
    assert not allowed(anything) & {CALL, SEP}
    called = GRAMMARS.compile(f"start: {GRAMMARS.marker('<call>')} {quoted('<sep>')}").follow()
    assert allowed(called) == {CALL}  # and not "<"
    called.commit([CALL])
    assert allowed(called) == {ord("<")}  # its characters, and not the control token
    assert GRAMMARS.marker("<none>") == quoted("<none>")


def test_a_look_ahead_moves_nothing_and_is_computed_once() -> None:
    class Counting:
        def __init__(self, matcher) -> None:
            self.matcher, self.n = matcher, 0

        def __getattr__(self, name: str):
            self.n += name == "unsafe_compute_mask_ptr"
            return getattr(self.matcher, name)

    follower = GRAMMARS.compile('start: "a"* "b"').follow()
    counting = follower._matcher = Counting(follower._matcher)
    drafting = [allowed(follower, [97] * k) for k in range(4)]
    judging = [allowed(follower, [97] * k) for k in range(4)]
    assert counting.n == 4
    assert drafting == judging
    follower.commit([97, 97])
    assert allowed(follower) == drafting[2]
    assert counting.n == 5
    assert allowed(follower, [98]) == {END, STOP}
    assert allowed(follower, [97]) == drafting[3]  # another branch, after that one
    assert allowed(follower) == drafting[2]


def test_any_order_of_looks_and_commits_gives_what_a_fresh_one_gives() -> None:
    grammar = compile_schema(GRAMMARS, {"type": "array", "items": {"enum": ["ab", None, 12]}})
    rng = random.Random(5)
    for _ in range(20):
        follower, tokens = grammar.follow(), []
        for _ in range(12):
            ahead: list[int] = []
            for _ in range(rng.randint(0, 4)):
                options = allowed(follower, ahead) - {END, STOP}
                if not options:
                    break
                ahead.append(rng.choice(sorted(options)))
            kept = ahead[: rng.randint(0, len(ahead))]
            follower.commit(kept)
            tokens += kept
            fresh = grammar.follow()
            fresh.commit(tokens)
            assert allowed(follower) == allowed(fresh)


def test_answers_to_one_request_do_not_share_their_place() -> None:
    grammar = GRAMMARS.compile('start: "ab" | "12"')
    first, second = grammar.follow(), grammar.follow()
    first.commit([257])
    assert allowed(first) == {END, STOP}
    assert allowed(second) == {ord("a"), 257, ord("1"), 264}


def test_a_token_from_outside_ends_it_and_says_so() -> None:
    follower = GRAMMARS.compile('start: "ab"').follow()
    assert allowed(follower, [ord("x")]) == {END, STOP}
    assert follower.failure is None  # nothing was committed
    follower.commit([ord("x")])
    assert follower.failure == "it does not allow token 120"
    assert allowed(follower) == {END, STOP}
    follower.commit([ord("a")])
    assert follower.failure == "it does not allow token 120"


def test_the_vocabulary_is_read_once_and_not_before_it_is_needed() -> None:
    made = grammars()
    assert made.vocab.n_read == 0
    made.compile('start: "a"')
    made.compile('start: "b"')
    assert made.vocab.n_read == N_VOCAB


# -- the law -----------------------------------------------------------------------------------


def masked(logits: np.ndarray, ids: set[int], temperature: float) -> np.ndarray:
    weights = np.zeros(len(logits))
    index = sorted(ids)
    weights[index] = np.exp(logits[index] / temperature)
    return weights / weights.sum()


LETTERS = GRAMMARS.compile("start: T\nT: /[a-d]{1,2}/ | /[0-3]2?/")
IN_LETTERS = ["".join(t) for n in (1, 2) for t in itertools.product("abcd", repeat=n)]
IN_LETTERS += ["0", "1", "2", "3", "02", "12", "22", "32"]


def exact(rows: np.ndarray, temperature: float) -> dict[tuple[int, ...], float]:
    """The probability of every path up to its end token: masked softmax, token by token."""
    found: dict[tuple[int, ...], float] = {}

    def spread(path: tuple[int, ...], p: float) -> None:
        law = masked(rows[len(path)], may_follow(text(path), IN_LETTERS), temperature)
        for token in map(int, law.nonzero()[0]):
            if token in (END, STOP):
                found[(*path, token)] = p * law[token]
            else:
                spread((*path, token), p * law[token])

    spread((), 1.0)
    return found


def drafted_path(chain: SamplingChain, rows: np.ndarray, guesses: np.ndarray) -> tuple[int, ...]:
    """One answer in rounds of two drafted tokens, which come from the rows of `guesses`."""
    path: list[int] = []
    while not path or path[-1] not in (END, STOP):
        tokens, laws = [], []
        while len(tokens) < 2 and not {END, STOP} & set(tokens):
            law, _ = chain.draft_probs(guesses[len(path) + len(tokens)], tokens)
            tokens.append(chain.draw(law, tokens))
            laws.append(law)
        judged = [
            chain.target_probs(rows[len(path) + k], tokens[:k]) for k in range(len(tokens) + 1)
        ]
        draft = Draft(tokens, laws, [1.0] * len(tokens), "test")
        verdict = verify(draft, judged.__getitem__, chain)
        new = [*tokens[: verdict.n_accepted], verdict.next_token]
        end = next((i for i, t in enumerate(new) if t in (END, STOP)), len(new) - 1)
        path += new[: end + 1]
        chain.commit(new[: end + 1])
    return tuple(path)


def test_drafted_and_judged_tokens_follow_the_masked_softmax() -> None:
    """Up to two tokens and an end, the drafts from other rows than those they are judged by."""
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(6, N_VOCAB)).astype(np.float32) * 2
    guesses = rows + rng.normal(size=rows.shape).astype(np.float32)
    params = SamplingParams(temperature=1.3, top_k=0, top_p=1.0, min_p=0.0)
    seen = Counter(
        drafted_path(SamplingChain(params, (), LETTERS.follow(), rng), rows, guesses)
        for _ in range(4_000)
    )
    assert excess(seen, exact(rows, 1.3)) < 1
    assert excess(seen, exact(rows, 1.0)) > 1  # what it can tell apart
    assert excess(seen, exact(guesses, 1.3)) > 1


def test_the_mask_comes_before_the_filters() -> None:
    logits = np.zeros(N_VOCAB, np.float32)
    logits[[ord("x"), ord("y"), ord("z")]] = 50  # all outside: filtering first would leave nothing
    logits[[ord("a"), ord("b"), ord("c")]] = 1, 0, -1
    follower = GRAMMARS.compile("start: /[a-c]/").follow()
    params = SamplingParams(temperature=1.0, top_k=2, top_p=1.0, min_p=0.0)
    law = SamplingChain(params, (), follower).target_probs(logits)
    assert list(law.ids) == [ord("a"), ord("b")]
    np.testing.assert_allclose(law.probs, [np.e / (np.e + 1), 1 / (np.e + 1)], rtol=1e-6)


# -- what is no grammar ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lark", "words"),
    [
        ("start: foo", 'line 1, column 8: unknown name: "foo"'),
        ("start: foo\nfoo: /(/", "line 2, column 6: invalid regex"),
        ("start: <foo>", "line 1, column 8: unknown special token"),
        ("start: <[9999]>", "line 1, column 8: Token range end too large"),
        ("start: start", "it allows no text"),
        ("", "no start rule found"),
        ('start: "\ud800"', "it is not Unicode"),
        (
            'start: "' + "a" * (1 << 20) + '"',
            "it has 1048585 characters, but at most 1048576 are allowed",
        ),
    ],
)
def test_what_is_no_grammar_is_refused_in_one_line(lark: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        GRAMMARS.compile(lark)
    assert str(caught.value).startswith(words)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("n", [1900, 3000])
def test_chains_that_would_overflow_the_stack_are_refused(n: int) -> None:
    """3,000 rules or references in a chain ended the process."""
    rules = "\n".join(f'r{i}: "a" r{i + 1}' for i in range(n))
    lark = f'start: r0\n{rules}\nr{n}: "b"'
    schema: dict[str, Any] = {
        f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(n)
    }
    schema = {"$ref": "#/$defs/d0", "$defs": schema | {f"d{n}": {"type": "null"}}}
    for compile_ in (lambda: GRAMMARS.compile(lark), lambda: compile_schema(GRAMMARS, schema)):
        if n < 2000:
            compile_()
        else:
            with pytest.raises(RequestError, match="but at most 2000 are allowed"):
                compile_()


def test_a_grammar_is_compiled_once() -> None:
    first = GRAMMARS.compile('start: "once"')
    assert GRAMMARS.compile('start: "once"') is first
    for i in range(40):
        GRAMMARS.compile(f'start: "{i}"')
    assert GRAMMARS.compile('start: "once"') is not first
