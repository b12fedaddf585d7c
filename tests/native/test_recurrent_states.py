"""Which states a recurrent cache can go back to: llama.cpp's rules, and its own word for them."""

from __future__ import annotations

from collections.abc import Iterator

import llama_cpp as L
import numpy as np
import pytest

from gguf_mtp.errors import CannotRewind, DecodeError, LoadFailed
from gguf_mtp.gguf.cache_layout import GOES_BACK
from gguf_mtp.llama import Context, ContextOptions, Model
from gguf_mtp.llama.recurrent_states import RecurrentStates, passes
from gguf_mtp.types import Floats, Rows
from tests.support import recurrent_models

N, N_SEQ, LENGTH = 4, 4, 90


def draft(seq: int, n: int) -> Rows:
    return Rows(seq, 0, [1] * (1 + n), 1 + n)


def still(seq: int, n: int = 1, n_outputs: int = 1) -> Rows:
    return Rows(seq, 0, [1] * n, n_outputs)


def test_all_but_the_first_row_of_a_draft_can_be_dropped_once() -> None:
    states = RecurrentStates(2, N)
    states.decoded([draft(0, 2), still(1, 9, 0)])
    assert [states.can_drop(0, n) for n in (1, 2, 3)] == [True, True, False]
    assert not states.can_drop(1, 1)
    states.dropped(0)
    assert not states.can_drop(0, 1)
    states.decoded([draft(0, 6), draft(1, 1)])
    assert [states.can_drop(0, n) for n in (4, 5)] == [True, False]
    states.decoded([draft(1, 1)])  # may have moved what the others had
    assert not states.can_drop(0, 1)


def test_a_state_is_shared_when_it_is_the_newest_one() -> None:
    states = RecurrentStates(2, N)
    states.decoded([draft(0, 2)])
    states.shared(0, 1)
    assert not states.can_drop(0, 1)  # the other one would move with it
    states.decoded([draft(0, 2)])
    states.dropped(0)
    assert not states.can_share(0)
    states.decoded([still(0)])
    assert states.can_share(0)
    states.dropped(0)
    states.replaced(0)
    assert states.can_share(0)


def test_drafts_of_one_length_are_decoded_together() -> None:
    assert passes([draft(0, 2), draft(1, 2), draft(2, 2)]) == [
        [draft(0, 2), draft(1, 2), draft(2, 2)]
    ]
    assert passes([draft(0, 2), still(1, 40, 0)]) == [[draft(0, 2), still(1, 40, 0)]]


def test_nothing_is_moved_behind_a_draft() -> None:
    rows = [draft(0, 1), draft(1, 3), still(2), draft(3, 3), still(4, 40, 0), draft(5, 2)]
    assert passes(rows) == [
        [still(2), still(4, 40, 0)],
        [draft(1, 3), draft(3, 3)],
        [draft(0, 1)],
        [draft(5, 2)],
    ]
    assert passes([still(0), still(1, 5, 0), still(2)]) == [[still(0), still(1, 5, 0), still(2)]]


@pytest.fixture(scope="module", params=GOES_BACK)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    path = tmp_path_factory.mktemp("states") / f"{request.param}.gguf"
    with Model(str(recurrent_models.write(path, request.param))) as loaded:
        yield loaded


def context_of(model: Model, n_rewind: int = N) -> Context:
    return model.context(
        ContextOptions(4 * 512, N_SEQ, 128, 64, n_threads=1, strict=True, n_rewind=n_rewind)
    )


def texts() -> list[list[int]]:
    rng = np.random.default_rng(5)
    return rng.integers(5, 290, (N_SEQ, LENGTH)).tolist()


@pytest.fixture(scope="module")
def alone(model: Model) -> list[Floats]:
    """What each text's rows compute, decoded one by one."""
    context, found = context_of(model, 0), []
    for seq, text in enumerate(texts()):
        steps = (context.decode([Rows(seq, i, [t], 1)]) for i, t in enumerate(text))
        found.append(np.concatenate([step.outputs[0].logits.copy() for step in steps]))
    context.close()
    return found


@pytest.mark.native
def test_what_is_not_kept_is_refused(model: Model) -> None:
    """llama.cpp itself would go back further than its last pass wrote, to another state."""
    context = context_of(model)
    context.decode([Rows(0, 0, [5, 6, 7, 8, 9, 10], 1)])
    context.decode([Rows(0, 6, [11, 12, 13], 3)])
    with pytest.raises(CannotRewind, match="after 6 rows is not kept"):
        context.rewind(0, 6)
    context.rewind(0, 7)
    with pytest.raises(CannotRewind):
        context.rewind(0, 6)
    with pytest.raises(CannotRewind):  # whose state is it?
        context.copy(0, 1, 7)
    context.decode([Rows(0, 7, [14], 1)])
    with pytest.raises(CannotRewind):
        context.rewind(0, 7)
    context.rewind(0, 0)
    assert context.n_past(0) == 0


@pytest.mark.native
@pytest.mark.parametrize("n_before", [0, 50, 120])
def test_after_a_pass_that_broke_off_the_sequences_are_empty(model: Model, n_before: int) -> None:
    """Their states are written over; one that only had no room, or came twice, is as before."""
    context = context_of(model)
    context.decode([Rows(0, 0, [5, 6, 7], 1), Rows(1, 0, [5, 6], 1), Rows(2, 0, [5], 1)])
    expected = context.decode([Rows(3, 0, [5, 6, 7, 8, 9], 1)]).outputs[0].logits.copy()
    steps_left = [n_before]

    def breaks_off(_: object) -> bool:
        steps_left[0] -= 1
        return steps_left[0] < 0

    callback = L.ggml_abort_callback(breaks_off)
    L.llama_set_abort_callback(context._ctx, callback, None)
    with pytest.raises(DecodeError, match="returned 2"):
        context.decode([Rows(0, 3, [8, 1], 2), Rows(1, 2, [7], 1), Rows(2, 1, [6, 7], 2)])
    L.llama_set_abort_callback(context._ctx, L.ggml_abort_callback(), None)
    assert [context.n_past(seq) for seq in range(4)] == [0, 0, 0, 5]
    again = context.decode([Rows(0, 0, [5, 6, 7, 8, 9], 1), Rows(3, 5, [4], 1)])
    np.testing.assert_allclose(again.outputs[0].logits, expected, atol=2e-3)
    context.close()


@pytest.mark.native
def test_a_batch_without_room_changes_nothing(model: Model) -> None:
    if not model._rules.unified:
        pytest.skip("each sequence has cells of its own")
    options = ContextOptions(256, 2, 128, 8, n_threads=1, strict=True, n_rewind=N)
    context = model.context(options)
    context.decode([Rows(0, 0, [5] * 120, 1)])
    context.decode([Rows(0, 120, [6, 7, 8], 3), Rows(1, 0, [9] * 100)])
    context.rewind(0, 122)
    with pytest.raises(DecodeError) as raised:
        context.decode([Rows(0, 122, [9], 1), Rows(1, 100, [9] * 100)])
    assert raised.value.code == 1
    assert [context.n_past(0), context.n_past(1)] == [122, 100]
    after = context.decode([Rows(0, 122, [9], 1)]).outputs[0].logits.copy()
    context.rewind(0, 0)
    context.decode([Rows(0, 0, [5] * 120, 1)])
    expected = context.decode([Rows(0, 120, [6, 7, 9], 1)]).outputs[0].logits
    np.testing.assert_allclose(after, expected, atol=2e-3)
    context.close()


@pytest.mark.native
def test_a_batch_too_small_for_its_states_is_refused(model: Model) -> None:
    """llama.cpp would abort in the first decode."""
    with pytest.raises(LoadFailed, match="cannot rewind 4 rows with a batch size of 5"):
        model.context(ContextOptions(256, 1, 5, 5, n_threads=1, n_rewind=4))
    context = model.context(ContextOptions(256, 1, 6, 5, n_threads=1, n_rewind=4))
    context.decode([Rows(0, 0, [5, 6, 7, 8, 9, 10])])
    context.decode([Rows(0, 6, [5, 6, 7, 8, 9], 5)])
    context.rewind(0, 7)
    context.close()


@pytest.mark.native
def test_no_room_behind_a_finished_pass_costs_the_sequences(model: Model) -> None:
    """Drafts of several lengths take several passes; the first has written states over."""
    if not model._rules.unified:
        pytest.skip("each sequence has cells of its own")
    context = model.context(ContextOptions(256, 3, 210, 8, n_threads=1, strict=True, n_rewind=N))
    context.decode([Rows(0, 0, [5] * 200), Rows(1, 0, [6] * 10)])
    context.decode([Rows(1, 10, [6] * 30), Rows(2, 0, [7] * 10)])
    with pytest.raises(DecodeError) as raised:
        context.decode([Rows(0, 200, [5] * 4, 4), Rows(1, 40, [6], 1), Rows(2, 10, [7] * 3, 3)])
    assert raised.value.code == 1
    assert [context.n_past(seq) for seq in range(3)] == [0, 0, 0]
    context.decode([Rows(0, 0, [5] * 200), Rows(1, 0, [6] * 10)])
    context.close()


class Storm:
    """Sequences that go on by drafts of which some rows are wrong, at random; each has a text."""

    def __init__(self, context: Context, alone: list[Floats], seed: int) -> None:
        self.context, self.alone, self.texts = context, alone, texts()
        self.rng = np.random.default_rng(seed)
        self.of = list(range(N_SEQ))  # which text a sequence holds
        self.n_dropped = self.n_refused = 0

    def round(self) -> None:
        chosen = self.rng.permutation(N_SEQ)[: self.rng.integers(1, N_SEQ + 1)]
        rows, good = [], []
        for seq in map(int, chosen):
            text, at = self.texts[self.of[seq]], self.context.n_past(seq)
            if at > LENGTH - N - 2:
                self.context.rewind(seq, 0)
                at = 0
            if at == 0:
                n = int(self.rng.integers(1, 30))
                rows.append(Rows(seq, 0, text[:n], int(self.rng.integers(0, 2))))
                good.append(n)
                continue
            n = int(self.rng.integers(0, N + 1))
            right = int(self.rng.integers(0, n + 1))
            tokens = text[at : at + 1 + right] + [3] * (n - right)
            rows.append(Rows(seq, at, tokens, 1 + n))
            good.append(1 + right)
        for r, n, out in zip(rows, good, self.context.decode(rows).outputs, strict=True):
            first = len(r.tokens) - r.n_outputs
            for i in range(first, n):
                expected = self.alone[self.of[r.seq]][r.pos + i]
                np.testing.assert_allclose(out.logits[i - first], expected, atol=2e-3)
        for r, n in zip(rows, good, strict=True):
            self.n_dropped += n < len(r.tokens)
            self.context.rewind(r.seq, r.pos + n)

    def other(self) -> None:
        src, dst = map(int, self.rng.permutation(N_SEQ)[:2])
        n = self.context.n_past(src)
        if self.rng.random() < 0.5:
            assert self.context.load(dst, self.context.save(src)) == n
        else:
            try:
                self.context.copy(src, dst, n)
            except CannotRewind:
                self.n_refused += 1
                return
        self.of[dst] = self.of[src]


@pytest.mark.native
@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_dropped_the_rest_is_as_decoded_alone(
    model: Model, alone: list[Floats], seed: int
) -> None:
    context = context_of(model)
    storm = Storm(context, alone, seed)
    for _ in range(120):
        storm.round()
        if storm.rng.random() < 0.2:
            storm.other()
    assert storm.n_dropped > 50
    assert storm.n_refused
    context.close()
