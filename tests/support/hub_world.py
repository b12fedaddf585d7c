"""The fake hub with the demo on it, and a client that does not sleep."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gguf_mtp.converters.hub import Hub, Repo, fetch_checkpoint
from gguf_mtp.converters.mla import Mtp
from gguf_mtp.converters.planning import ConvertOptions as Options
from gguf_mtp.demo import CHECKPOINT
from tests.support.fake_hub import FakeHub, serving

MINE = Repo("me/demo")


class World:
    """The fake hub with the demo on it, a client for it, and the pauses that the client made."""

    def __init__(self, fake: FakeHub, cache: Path) -> None:
        self.fake, self.pauses = fake, list[float]()
        self.hub = Hub(fake.endpoint, cache, None, self.pauses.append)

    def checkpoint(self, mtp: Mtp = "keep", repo: Repo = MINE) -> Path:
        return fetch_checkpoint(self.hub, repo, Options(mtp=mtp).needs)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    # The library sleeps between its own tries; they are not what is tested.
    monkeypatch.setattr("time.sleep", lambda _: None)
    with serving() as fake:
        fake.repos["me/demo"] = {p.name: p.read_bytes() for p in CHECKPOINT.iterdir()}
        yield World(fake, tmp_path / "cache")
