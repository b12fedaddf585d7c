"""What the n-gram drafter copies, on texts short enough to see why."""

from __future__ import annotations

import random
import time

import pytest

from gguf_mtp.drafters.ngram import LONGEST, N_CANDIDATES, SIZES, NgramDrafter
from gguf_mtp.params import SamplingParams
from gguf_mtp.sampling.chain import SamplingChain
from gguf_mtp.types import Ask, Draft, DraftLimit, Rows

GREEDY = SamplingChain(SamplingParams(temperature=0))
A, B, C, D, E, F, G, H, X, Y = range(10)


def draft(tokens: list[int], n: int = 4) -> Draft:
    drafter = NgramDrafter(1)
    drafter.observe([Rows(0, 0, tokens[:-1])])
    return drafter.propose([Ask(0, tokens, DraftLimit(n), GREEDY)])[0]


def test_what_followed_before_is_drafted() -> None:
    found = draft([A, B, C, D, E, F, A, B])
    assert found.tokens == [C, D, E, F]
    assert found.source == "ngram"
    assert found.probs == [None] * 4


@pytest.mark.parametrize("tokens", [[A], [A, A], [A, B, C, A], [A, B, C, B, A]])
def test_nothing_is_drafted_where_no_two_tokens_recur(tokens: list[int]) -> None:
    assert draft(tokens) == Draft((), (), (), "ngram")


def test_the_longest_match_counts_not_the_newest() -> None:
    # C D was last followed by Y, but A B C D was followed by E
    assert draft([A, B, C, D, E, C, D, Y, A, B, C, D], 1).tokens == [E]


def test_of_equal_matches_the_newest_counts() -> None:
    assert draft([A, B, E, F, A, B, G, F, X, A, B], 1).tokens == [G]


def test_a_text_that_repeats_itself_is_continued_beyond_its_end() -> None:
    assert draft([X, A, B, A, B], 5).tokens == [A, B, A, B, A]
    assert draft([X, Y, Y, Y, Y], 3).tokens == [Y, Y, Y]


def test_confidence_grows_with_the_match_and_along_the_draft() -> None:
    short, long = draft([A, B, C, X, A, B]), draft([A, B, C, X, Y, A, B, C])
    assert short.confidence[0] == 1 - 1 / 2
    assert long.confidence[0] == 1 - 1 / 3
    assert list(short.confidence) == sorted(set(short.confidence))
    endless = draft([A, B] * 100, 1)
    assert endless.confidence == [1 - 1 / LONGEST]


def test_only_what_is_left_after_a_rewind_is_found() -> None:
    drafter = NgramDrafter(1)
    tokens = [A, B, C, D, A, B, E, F, A, B]
    drafter.observe([Rows(0, 0, tokens[:-1])])
    drafter.rewind(0, 5)  # A B C D A
    tokens = [A, B, C, D, A, B]
    drafter.observe([Rows(0, 4, tokens[4:-1])])
    [found] = drafter.propose([Ask(0, tokens, DraftLimit(2), GREEDY)])
    assert found.tokens == [C, D]


def test_sequences_do_not_see_each_other() -> None:
    drafter = NgramDrafter(2)
    drafter.observe([Rows(0, 0, [A, B, C, D]), Rows(1, 0, [E, F])])
    [found] = drafter.propose([Ask(1, [E, F, A, B], DraftLimit(2), GREEDY)])
    assert not found.tokens


def brute_force(tokens: list[int], n: int) -> list[int]:
    """The rule, written down over the whole text."""
    end = len(tokens)
    for size in SIZES:
        ends = [
            p for p in range(size - 1, end - 1) if tokens[p + 1 - size : p + 1] == tokens[-size:]
        ]
        if ends:
            break
    else:
        return []

    def length(p: int) -> int:
        most = min(LONGEST, p + 1)
        return next((k for k in range(most) if tokens[p - k] != tokens[end - 1 - k]), most)

    newest = sorted(ends, reverse=True)[:N_CANDIDATES]
    best = max(newest, key=lambda p: (length(p), p))
    text = list(tokens)
    for k in range(n):
        text.append(text[best + 1 + k])
    return text[end:]


@pytest.mark.parametrize("seed", range(20))
def test_the_index_finds_what_a_search_of_the_text_finds(seed: int) -> None:
    rng = random.Random(seed)
    n_vocab = rng.choice([2, 3, 6])
    drafter, tokens, n_found = NgramDrafter(1), [0], 0
    for _ in range(300):
        if rng.random() < 0.1:
            n = max(1, len(tokens) - rng.randint(0, 12))
            drafter.rewind(0, n)
            del tokens[n:]
        tokens.append(rng.randrange(n_vocab))
        drafter.observe([Rows(0, len(tokens) - 2, tokens[-2:-1])])
        [found] = drafter.propose([Ask(0, tokens, DraftLimit(6), GREEDY)])
        assert list(found.tokens) == brute_force(tokens, 6)
        n_found += bool(found.tokens)
    assert n_found > 20


def test_a_token_costs_the_same_in_a_long_text() -> None:
    """Committing and drafting do not search the text: a hundred times the text, about the same
    time. The least of several runs is compared, with a wide margin."""

    def seconds(n: int) -> float:
        rng = random.Random(1)
        drafter = NgramDrafter(1)
        tokens = [rng.randrange(50) for _ in range(n)]
        drafter.observe([Rows(0, 0, tokens[:-1])])
        best = 1.0
        for _ in range(20):
            start = time.perf_counter()
            for _ in range(20):
                tokens.append(rng.randrange(50))
                drafter.observe([Rows(0, len(tokens) - 2, tokens[-2:-1])])
                drafter.propose([Ask(0, tokens, DraftLimit(8), GREEDY)])
            best = min(best, (time.perf_counter() - start) / 20)
        return best

    assert seconds(100_000) < 10 * seconds(1_000)
