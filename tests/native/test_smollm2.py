"""Copies on a real model without an MTP block (SmolLM2-135M): real text that repeats itself."""

from __future__ import annotations

from pathlib import Path

import pytest

import gguf_mtp
from gguf_mtp.loading.loader import LoadOptions
from gguf_mtp.params import SamplingParams
from gguf_mtp.session import Session
from gguf_mtp.stats import Stats
from tests.support.smollm2 import download

pytestmark = [pytest.mark.native, pytest.mark.slow]

GREEDY = SamplingParams(temperature=0)
CODE = """def area(width, height):
    \"\"\"Area of a rectangle.\"\"\"
    if width < 0 or height < 0:
        raise ValueError("negative")
    return width * height
"""
ASK = f"Repeat this Python code exactly as it is, twice:\n\n{CODE}"


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return download(tmp_path_factory.mktemp("smollm2"))


def answer(session: Session, ask: str, n: int) -> tuple[str, Stats]:
    prompt = session.chat_tokens([{"role": "user", "content": ask}])
    chunks = list(session.engine.generate([prompt], GREEDY, n))
    stats = chunks[-1].stats
    assert stats
    tokens = [t for chunk in chunks for t in chunk.tokens]
    return b"".join(map(session.vocab.piece, tokens)).decode(errors="replace"), stats


def test_a_model_without_a_block_drafts_by_itself(smollm2: Path) -> None:
    with gguf_mtp.load(smollm2, LoadOptions(n_ctx=1024)) as session:
        assert session.facts.architecture == "llama"
        assert session.engine.drafting.names == ("ngram",)
        _, stats = answer(session, "Write a short poem about the sea.", 200)  # it goes in circles
        assert stats.by_drafter["ngram"][2] > 10


def test_repeated_code_is_copied(smollm2: Path) -> None:
    options = LoadOptions(n_ctx=1024, draft="ngram", draft_min=4, draft_max=4)
    with gguf_mtp.load(smollm2, options) as session:
        text, stats = answer(session, ASK, 120)
        assert "def area(width, height):" in text
        [_, drafted, accepted] = stats.by_drafter["ngram"]
        assert accepted > 0.6 * drafted
        assert stats.rounds < 0.5 * stats.decode_tokens
