"""A drafter that nothing else knows: one spec in the registry is all that it takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import gguf_mtp
from gguf_mtp.cli.log_files import open_files, watch
from gguf_mtp.cli.open_session import describe
from gguf_mtp.cli.sampling_options import SamplingArgs
from gguf_mtp.cli.serve import _served
from gguf_mtp.cli.trace import drawn
from gguf_mtp.demo import demo_model
from gguf_mtp.depth import AutoDepth
from gguf_mtp.drafters.registry import DRAFTERS
from gguf_mtp.drafters.spec import DrafterSpec
from gguf_mtp.errors import UnsupportedModel
from gguf_mtp.loading.loader import LoadOptions
from gguf_mtp.params import SamplingParams
from gguf_mtp.server.app import ServerOptions
from gguf_mtp.session import Session
from gguf_mtp.telemetry.trace import read
from tests.support.oracle import Oracle
from tests.support.serving import serving

pytestmark = pytest.mark.native

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = SamplingParams(temperature=0)
KNOWN: list[list[int]] = []


class Toy(Oracle):
    """Knows the answer to one question, and is wrong at one token in four."""

    name = "toy"

    def __init__(self) -> None:
        super().__init__(KNOWN)


def never(_target: object, _file: object) -> str:
    return "the toy is broken"


TOY = DrafterSpec("toy", "a toy", lambda _: Toy())


@contextmanager
def loaded(draft: str, low: int = 0, high: int = 8) -> Iterator[Session]:
    options = LoadOptions(
        n_ctx=256, n_seq=2, n_threads=1, strict=True, draft=draft, draft_min=low, draft_max=high
    )
    with gguf_mtp.load(demo_model(kind="f32"), options) as session:
        yield session


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DRAFTERS, "toy", TOY)


@pytest.fixture(scope="module")
def plain() -> list[int]:
    with loaded("off") as session:
        prompt = session.chat_tokens(QUESTION)
        chunks = list(session.engine.generate([prompt], GREEDY, 30))
    KNOWN[:] = [[*prompt, *(t for c in chunks for t in c.tokens)]]
    return KNOWN[0][len(prompt) :]


def test_it_is_selected_named_and_exact(plain: list[int]) -> None:
    for draft, names in (("toy", ("toy",)), ("ngram,toy", ("ngram", "toy"))):
        with loaded(draft) as session:
            assert session.engine.drafting.names == names
            assert "a toy" in describe(session)
            pieces = list(session.chat(QUESTION, GREEDY, 30))
        assert [t for p in pieces for t in p.tokens] == plain


def test_auto_takes_it_where_nothing_before_it_can_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mtp", "model"):
        monkeypatch.delitem(DRAFTERS, name)
    with loaded("auto") as session:
        assert session.engine.drafting.names == ("ngram", "toy")


def test_what_it_says_against_drafting_is_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DRAFTERS, "toy", DrafterSpec("toy", "a toy", TOY.build, why_not=never))
    with pytest.raises(UnsupportedModel, match="cannot draft: the toy is broken"), loaded("toy"):
        pass


@pytest.mark.usefixtures("plain")
def test_it_is_priced() -> None:
    """Whether it pays is for the clock to say, not for a test; it is tried all the same, and from
    the second round in a row on its steps are timed."""
    with loaded("toy") as session:
        depth = session.engine.depth
        assert isinstance(depth, AutoDepth)
        for _ in range(300):
            list(session.chat(QUESTION, GREEDY, 30))
            if depth.controllers["toy"].draft.n > 0:
                break
        drafts = session.engine.totals.by_drafter["toy"]
        assert depth.controllers["toy"].draft.n > 0
    assert drafts[2] > 0


@pytest.mark.usefixtures("plain")
def test_it_is_traced_counted_and_served(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    with loaded("toy", 3, 3) as session, open_files("off", file, goes_on=False) as files:
        metrics = watch(session, files)
        served = _served(session, "demo", True, SamplingArgs(temp=0.0))
        with serving(session.engine, served, ServerOptions(metrics=metrics)) as server:
            body = {"messages": QUESTION, "max_tokens": 30, "return_token_sources": True}
            events = server.events(**body)
            found = server.client.get("/metrics").text
    sources = {e["choices"][0].get("token_source") for e in events[:-1] if e["choices"]}
    assert "toy" in sources
    assert 'spec_decode_num_accepted_tokens_total{source="toy"}' in found
    recording = read(file)
    assert any("toy" in line for line in drawn(recording, 80))
