"""Prompt chunks: about a second each, adapted."""

from __future__ import annotations

import pytest

from gguf_mtp.engine.prefill_chunk import PrefillChunker


def settle(rows_per_s: float, is_alone: bool, n_batch: int = 512) -> tuple[int, float]:
    """Rows and seconds of the chunk that a machine of this speed ends up with."""
    pace, n = PrefillChunker(n_batch), 0
    for _ in range(12):
        n = pace.n_rows(is_alone)
        pace.update(n, n / rows_per_s)
    return n, n / rows_per_s


@pytest.mark.parametrize("rows_per_s", [60.0, 200.0, 400.0])
def test_a_chunk_takes_about_a_second(rows_per_s: float) -> None:
    n, seconds = settle(rows_per_s, is_alone=False)
    assert 0.9 <= seconds <= 1.1, n


def test_a_fast_machine_fills_its_batch_and_a_slow_one_stays_at_the_floor() -> None:
    assert settle(1e6, is_alone=True)[0] == 512
    assert settle(1.0, is_alone=False)[0] == PrefillChunker.FLOOR
    assert settle(1.0, is_alone=True)[0] == PrefillChunker.FLOOR_ALONE
    assert settle(1.0, is_alone=True, n_batch=16)[0] == 16


def test_the_first_chunk_is_small_whatever_the_machine() -> None:
    assert PrefillChunker(512).n_rows(is_alone=True) == PrefillChunker.FIRST


def test_the_short_end_of_a_prompt_says_nothing_about_speed() -> None:
    pace = PrefillChunker(512)
    pace.update(64, 0.1)
    before = pace.n_rows(False)
    pace.update(1, 0.9)
    assert pace.n_rows(False) == before
