from __future__ import annotations

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gguf_mtp.answers.detokenizer import Detokenizer
from gguf_mtp.answers.stop_strings import Cut, StopStrings
from gguf_mtp.errors import RequestError

# Valid text, half characters, and bytes that are never part of one.
PIECES = st.lists(
    st.one_of(
        st.text(max_size=3).map(str.encode),
        st.binary(max_size=3),
        st.sampled_from(
            [b"\xf0\x9f", b"\x98\x80", b"\xe2\x82", b"\xac", b"\xff", b"", b"\xed\xa0"]
        ),
    ),
    max_size=12,
)


# -- detokenizer ---------------------------------------------------------------------------------


@given(PIECES)
@example([b"\xf0", b"\x9f", b"\x98", b"\x80"])
@example([b"\xf0\x9f", b"a"])
@example([b"\xed\xa0", b"\x80"])
def test_pieces_together_are_the_whole_decode(pieces: list[bytes]) -> None:
    detokenizer = Detokenizer(pieces.__getitem__)
    parts = [detokenizer.add([token]) for token in range(len(pieces))]
    whole = b"".join(pieces).decode("utf-8", errors="replace")
    assert "".join(parts) + detokenizer.finish() == whole


@given(st.text(max_size=20), st.integers(1, 4))
def test_a_character_is_never_split_nor_late(text: str, width: int) -> None:
    raw = text.encode()
    pieces = [raw[i : i + width] for i in range(0, len(raw), width)]
    detokenizer = Detokenizer(pieces.__getitem__)
    shown = ""
    for token in range(len(pieces)):
        shown += detokenizer.add([token])
        assert shown == raw[: (token + 1) * width].decode("utf-8", errors="ignore")
    assert detokenizer.finish() == ""


def test_a_broken_end_becomes_one_replacement_character() -> None:
    detokenizer = Detokenizer([b"ab", b"\xf0\x9f\x98"].__getitem__)
    assert detokenizer.add([0, 1]) == "ab"
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_tokens_within_a_number_of_characters() -> None:
    pieces = [b"Hello", b" wor", b"ld", b"", b"\xe2\x82", b"\xac", b"!"]
    detokenizer = Detokenizer(pieces.__getitem__)
    assert detokenizer.add(range(7)) == "Hello world€!"
    assert [detokenizer.n_tokens(n) for n in (0, 4, 5, 8, 9)] == [0, 0, 1, 1, 2]
    assert detokenizer.n_tokens(11) == 4  # the empty token comes with what stands before it
    assert detokenizer.n_tokens(12) == 6  # both halves of the euro sign, or none
    assert detokenizer.n_tokens(13) == 7


# -- stop strings --------------------------------------------------------------------------------


def first_stop(text: str, stops: list[str]) -> int | None:
    """By definition: the first character that completes a stop; the longest that ends there."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts)
    return None


def held_back(text: str, stops: list[str]) -> int:
    lengths = range(len(text), 0, -1)
    return next((n for n in lengths if any(s.startswith(text[-n:]) for s in stops)), 0)


WORDS = st.text(alphabet="ab", min_size=1, max_size=5)


@given(st.lists(st.text(alphabet="ab", max_size=6), max_size=8), st.lists(WORDS, max_size=3))
@example(["aab", "aa"], ["aaa", "aabaab"])
@example(["ab", "cX"], ["abcX", "c"])
@example(["aabaa", "b"], ["aabaab", "ab"])
def test_any_chunking_cuts_where_the_definition_says(chunks: list[str], stops: list[str]) -> None:
    finder, shown, seen = StopStrings(stops), "", ""
    for chunk in chunks:
        seen += chunk
        at = first_stop(seen, stops)
        cut = finder.add(chunk)
        shown += cut.text
        assert cut.at == at
        # All that can be shown is shown, and nothing that may have to be taken back.
        assert shown == (seen[: len(seen) - held_back(seen, stops)] if at is None else seen[:at])
    expected = seen[: first_stop(seen, stops)]
    assert shown + finder.finish() == expected


def test_a_stop_in_the_middle_of_a_run_of_tokens() -> None:
    pieces = [b"yes", b"\nUs", b"er", b":", b" no"]
    detokenizer, finder = Detokenizer(pieces.__getitem__), StopStrings(["\nUser:"])
    assert finder.add(detokenizer.add([0, 1])) == Cut("yes", None)
    cut = finder.add(detokenizer.add([2, 3, 4]))
    assert cut == Cut("", 3)
    assert cut.at is not None
    assert detokenizer.n_tokens(cut.at) == 1
    assert finder.add("more") == Cut("", 3)
    assert finder.finish() == ""


def test_without_stops_nothing_is_held() -> None:
    finder = StopStrings([])
    assert finder.add("abc") == Cut("abc", None)
    assert finder.finish() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match="empty"):
        StopStrings(["a", ""])


def test_time_is_linear_in_the_text() -> None:
    def seconds(n: int) -> float:
        finder = StopStrings(["a" * 1000 + "b"])
        start = time.process_time()  # what else the machine does does not count
        for _ in range(n):
            finder.add("a")
        return time.process_time() - start

    short, long = (min(seconds(n) for _ in range(3)) for n in (5_000, 40_000))
    assert long < 8 * short * 3  # quadratic would be 64 times
