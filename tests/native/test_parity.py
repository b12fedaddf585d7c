"""The converted file computes what PyTorch computes from the checkpoint, trunk and MTP block.

600 held-out positions, past position 512 too, where YaRN's scaling shows. F32 weights and cache, no
flash attention: what differs is a mistake in the conversion or the graph, not rounding.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from gguf_mtp.demo import CHECKPOINT, demo_model
from gguf_mtp.llama import ContextOptions, Model, ModelOptions
from gguf_mtp.types import Floats, Rows

pytestmark = pytest.mark.native

N = 640  # positions 0 to 639; the last 600 are compared
PROMPTS = Path(__file__).parents[2] / "bench/prompts/held_out.json"


class Pair(NamedTuple):
    ours: Floats
    reference: Floats

    def relative(self) -> float:
        """max |difference| / max |value| over the compared positions."""
        a, b = self.ours[-600:], self.reference[-600:]
        return float(np.abs(a - b).max() / np.abs(b).max())


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Pair]]:
    from tests.support.reference import Reference

    folder = tmp_path_factory.mktemp("parity")
    reference = Reference(CHECKPOINT, folder)
    path = demo_model(folder, kind="f32")
    options = ContextOptions(N, 1, N, N, n_threads=2, hidden=True, strict=True)
    mtp_options = ContextOptions(N, 1, N, N, n_threads=2, is_mtp=True, strict=True)
    with Model(str(path), ModelOptions(load_mtp=True)) as model:
        tokens = held_out_tokens(model)
        (trunk,) = model.context(options).decode([Rows(0, 0, tokens, N)]).outputs
        assert trunk.hidden is not None
        hidden = trunk.hidden.copy()
        rows = Rows(0, 1, tokens[1:], N - 1, hidden[:-1])
        (mtp,) = model.context(mtp_options).decode([rows]).outputs
        assert mtp.hidden is not None
        logits, trunk_hidden = reference.trunk(tokens)
        mtp_logits, mtp_hidden = reference.mtp(trunk_hidden[:-1], tokens[1:])
        yield {
            "trunk logits": Pair(trunk.logits, logits.numpy()),
            "trunk hidden": Pair(hidden, trunk_hidden.numpy()),
            "mtp logits": Pair(mtp.logits, mtp_logits.numpy()),
            "mtp hidden": Pair(mtp.hidden, mtp_hidden.numpy()),
        }


def held_out_tokens(model: Model) -> list[int]:
    prompts = json.loads(PROMPTS.read_text())
    text = "".join(f"<｜User｜>{prompt}<｜Assistant｜>" for prompt in prompts)
    tokens = model.vocab.tokenize(text, add_special=True)
    assert len(tokens) >= N
    return tokens[:N]


@pytest.mark.parametrize("what", ["trunk logits", "trunk hidden", "mtp logits", "mtp hidden"])
def test_equals_pytorch(pairs: dict[str, Pair], what: str) -> None:
    relative = pairs[what].relative()
    print(f"{what}: {relative:.1e}")
    assert relative < 1e-4


@pytest.mark.parametrize("what", ["trunk logits", "mtp logits"])
def test_most_likely_token_equals_pytorch(pairs: dict[str, Pair], what: str) -> None:
    ours, reference = pairs[what]
    assert (ours.argmax(1) == reference.argmax(1)).mean() == 1


def test_mtp_predicts_the_trunks_next_choice(pairs: dict[str, Pair]) -> None:
    """Row i of the block and row i + 1 of the trunk predict the same token: a shift would show."""
    draft, target = pairs["mtp logits"].ours[:-1], pairs["trunk logits"].ours[1:-1]
    agree = (draft.argmax(1) == target.argmax(1)).mean()
    shifted = (draft[1:].argmax(1) == target[:-1].argmax(1)).mean()
    assert agree > 0.5 > shifted
