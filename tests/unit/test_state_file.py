"""Saved sequences: taken up again exactly, or refused in a sentence with nothing changed."""

from __future__ import annotations

import dataclasses
import hashlib
import json

import pytest

from gguf_mtp.engine.state_file import MAGIC, pack, unpack
from gguf_mtp.errors import ContextFull, RequestError, SavedStateError
from tests.support.fakes import FakeMtp, FakeTarget
from tests.unit.test_engine import GREEDY, NO_END, collect, engine_of, greedy

LIMITS = dataclasses.replace(NO_END, fingerprint="model A")


def test_what_was_packed_is_unpacked() -> None:
    data = pack("model A", [1, 2, 3], {"target": b"abc", "drafter": b""})
    assert unpack(data, "model A") == ([1, 2, 3], {"target": b"abc", "drafter": b""})


def test_every_damaged_byte_is_noticed() -> None:
    data = pack("model A", [1, 2, 3], {"target": b"abc"})
    for i in range(len(data)):
        broken = data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :]
        with pytest.raises(SavedStateError):
            unpack(broken, "model A")
    for n in range(len(data)):
        with pytest.raises(SavedStateError):
            unpack(data[:n], "model A")


def test_what_is_wrong_is_said() -> None:
    data = pack("model A", [1], {"target": b""})
    for broken, message in [
        (b"GGUF" + data, "not a saved sequence"),
        (MAGIC[:-1] + b"\x09" + data[8:], "another version"),
        (data[:-1], "damaged"),
    ]:
        with pytest.raises(SavedStateError, match=message):
            unpack(broken, "model A")
    with pytest.raises(SavedStateError, match="model A, not model B"):
        unpack(data, "model B")


def forged(header: object, *parts: bytes) -> bytes:
    """With a right checksum: anybody can write one."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    body = len(raw).to_bytes(4, "little") + raw + b"".join(parts)
    return MAGIC + hashlib.sha256(body).digest() + body


SOUND = {"fingerprint": "model A", "tokens": [1, 2], "parts": [["target", 3]]}


@pytest.mark.parametrize(
    "header",
    [
        b"", b"{}", b"[]", b"null", b"\xff", b"[" * 100_000, {"fingerprint": 1},
        SOUND | {"fingerprint": 1}, SOUND | {"tokens": None}, SOUND | {"tokens": ["a"]},
        SOUND | {"tokens": [-1]}, SOUND | {"tokens": [1 << 40]}, SOUND | {"tokens": [True]},
        SOUND | {"parts": []}, SOUND | {"parts": [["target", -5]]}, SOUND | {"parts": [["x", 3]]},
        SOUND | {"parts": [["target"]]}, SOUND | {"parts": ["target"]}, SOUND | {"parts": {"a": 1}},
        SOUND | {"parts": [["target", 2]]}, SOUND | {"parts": [["target", 4]]},
        SOUND | {"parts": [["target", 1e9]]}, {"fingerprint": "model A"},
    ],
)  # fmt: skip
def test_a_forged_header_is_refused(header: object) -> None:
    assert unpack(forged(SOUND, b"abc"), "model A").tokens == [1, 2]
    with pytest.raises(SavedStateError) as caught:
        unpack(forged(header, b"abc"), "model A")
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("depth", [0, 2])
def test_a_restored_sequence_goes_on_as_if_never_gone(depth: int) -> None:
    first = [3, 1, 4, 1, 5]
    engine = engine_of(FakeTarget(), depth, LIMITS)
    [answer], _ = collect(engine, [first], 9)
    data = engine.save([*first, *answer])

    fresh = engine_of(FakeTarget(), depth, LIMITS)
    assert fresh.restore(data) == [*first, *answer]
    follow_up = [*first, *answer, 8, 8]
    [second], [end] = collect(fresh, [follow_up], 20)
    assert second == greedy(follow_up, 20)
    assert end.stats is not None
    assert end.stats.cached_tokens == len(first) + len(answer) - 1
    _, [cold] = collect(engine_of(FakeTarget(), depth, LIMITS), [follow_up], 20)
    assert cold.stats is not None
    assert end.stats.accepted_per_position == cold.stats.accepted_per_position


def test_saving_does_not_disturb_the_sequence() -> None:
    engine = engine_of(FakeTarget(), 2, LIMITS)
    [answer], _ = collect(engine, [[3, 1, 4]], 9)
    follow_up = [3, 1, 4, *answer, 8]
    engine.save([3, 1, 4, *answer])
    assert collect(engine, [follow_up], 20)[0] == [greedy(follow_up, 20)]


def test_refusals_change_nothing() -> None:
    engine = engine_of(FakeTarget(), 2, LIMITS)
    [answer], _ = collect(engine, [[3, 1, 4]], 9)
    data = engine.save([3, 1, 4, *answer])
    with pytest.raises(SavedStateError, match="damaged"):
        engine.restore(data[:-1])
    small = engine_of(FakeTarget(), 2, dataclasses.replace(LIMITS, n_ctx=8))
    with pytest.raises(ContextFull):
        small.restore(data)
    plain = engine_of(FakeTarget(), 2, dataclasses.replace(LIMITS, fingerprint="model B"))
    with pytest.raises(SavedStateError, match="another model"):
        plain.restore(data)
    with pytest.raises(SavedStateError, match="nothing to save"):
        engine.save([9, 9, 9])
    follow_up = [3, 1, 4, *answer, 8]
    [_], [end] = collect(engine, [follow_up], 5)
    assert end.stats is not None
    assert end.stats.cached_tokens == 11


def test_a_running_sequence_is_neither_saved_nor_overwritten() -> None:
    engine = engine_of(FakeTarget(), 2, LIMITS)
    [answer], _ = collect(engine, [[3, 1, 4]], 9)
    data = engine.save([3, 1, 4, *answer])
    engine.submit([5, 6, 7], GREEDY, 20)
    engine.step()
    with pytest.raises(RequestError, match="all slots are busy"):
        engine.restore(data)
    with pytest.raises(SavedStateError, match="nothing to save"):
        engine.save([5, 6, 7])


def test_a_state_that_the_target_refuses_leaves_an_empty_slot() -> None:
    engine = engine_of(FakeTarget(), 2, LIMITS)
    [answer], _ = collect(engine, [[3, 1, 4]], 9)
    data = engine.save([3, 1, 4, *answer])
    target, mtp = FakeTarget(), FakeMtp()
    target.refuses = True
    other = engine_of(target, 2, LIMITS, mtp)
    with pytest.raises(SavedStateError):
        other.restore(data)
    assert collect(other, [[3, 1, 4]], 9)[0] == [answer]


def test_a_drafter_that_was_given_up_since_is_not_missed() -> None:
    """What was saved with it is restored without it, and what was saved without it as well; but not
    where it drafts, since its rows are not there."""
    prompt = [3, 1, 4, 1, 5]
    engine = engine_of(FakeTarget(), 2, LIMITS)
    [answer], _ = collect(engine, [prompt], 9)
    with_drafter = engine.save([*prompt, *answer])
    follow_up = [*prompt, *answer, 8]
    broken = engine_of(FakeTarget(), 2, LIMITS, FakeMtp(fail_at=frozenset([1])))
    collect(broken, [prompt], 9)
    assert broken.stopped_drafting
    without = broken.save([*prompt, *answer])
    for data in (with_drafter, without):
        broken.restore(data)
        [second], [end] = collect(broken, [follow_up], 20)
        assert second == greedy(follow_up, 20)
        assert end.stats is not None
        assert end.stats.cached_tokens > 0
    fresh = engine_of(FakeTarget(), 2, LIMITS)
    with pytest.raises(SavedStateError, match="saved after the drafter mtp had stopped"):
        fresh.restore(without)
    assert collect(fresh, [prompt], 9)[0] == [answer]
