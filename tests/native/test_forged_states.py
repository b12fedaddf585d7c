"""Saved sequences with a right checksum and wrong contents: restored, or refused; never a crash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from random import Random

import pytest

import gguf_mtp
from gguf_mtp.demo import demo_model
from gguf_mtp.engine.state_file import MAGIC, unpack
from gguf_mtp.errors import GgufMtpError, SavedStateError
from gguf_mtp.loading.loader import LoadOptions
from gguf_mtp.params import SamplingParams
from gguf_mtp.session import Session
from tests.native.test_first_load import forked

pytestmark = pytest.mark.native

GREEDY = SamplingParams(temperature=0)
OPTIONS = LoadOptions(n_ctx=128, n_threads=1, draft_min=2, draft_max=2)
N_FORGED = 150


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with gguf_mtp.load(demo_model(), OPTIONS) as session:
        yield session


def answer(session: Session, prompt: list[int]) -> list[int]:
    return [t for c in session.engine.generate([prompt], GREEDY, 8) for t in c.tokens]


def forged(data: bytes, fingerprint: str, random: Random) -> bytes:
    """One part of the sequence cut, filled up or changed, counts above all."""
    saved = unpack(data, fingerprint)
    parts = dict(saved.parts)
    name = random.choice(sorted(parts))
    part = bytearray(parts[name])
    how = random.randrange(5)
    if how == 0:
        del part[random.randrange(len(part) + 1) :]
    elif how == 1:
        part += bytes(100)
    elif how == 2:
        part.clear()
    else:
        for _ in range(random.randrange(1, 4)):
            at = random.randrange(min(len(part), 80)) // 4 * 4
            value = random.choice((0, 1, 255, 65535, (1 << 31) - 1, 1 << 31, (1 << 32) - 1))
            part[at : at + 4] = value.to_bytes(4, "little")
    parts[name] = bytes(part)
    tokens = saved.tokens if random.random() < 0.8 else saved.tokens[:-3]
    sizes = [[name, len(part)] for name, part in parts.items()]
    raw = json.dumps({"fingerprint": fingerprint, "tokens": tokens, "parts": sizes}).encode()
    body = len(raw).to_bytes(4, "little") + raw + b"".join(parts.values())
    return MAGIC + hashlib.sha256(body).digest() + body


def test_forged_sequences(session: Session) -> None:
    """In forks of this process. Where one is refused, the engine answers as before."""
    prompt = session.chat_tokens([{"role": "user", "content": "What is the capital of Peru?"}])
    expected = answer(session, prompt)
    data = session.engine.save([*prompt, *expected])
    fingerprint = session.engine._fingerprint
    random, ends = Random(1), dict[str, int]()
    for _ in range(N_FORGED):
        wrong = forged(data, fingerprint, random)

        def use(wrong: bytes = wrong) -> int:
            try:
                session.engine.restore(wrong)
            except SavedStateError:
                return 1 if answer(session, prompt) == expected else 2
            try:
                answer(session, [5, 6, 7])
            except GgufMtpError:
                return 1
            return 0

        end = forked(use)
        ends[end] = ends.get(end, 0) + 1
    assert set(ends) == {"ran", "refused"}, ends
    assert ends["refused"] > N_FORGED // 2
