"""The demo widened computes what the demo computes, and is as large as it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from gguf_mtp.bench.widen import KINDS, Widening, widen
from gguf_mtp.converters.convert import ConvertOptions, convert
from gguf_mtp.converters.planning import plan
from gguf_mtp.demo import CHECKPOINT, demo_model
from gguf_mtp.llama import ContextOptions, Model, ModelOptions
from gguf_mtp.types import Floats, Rows

pytestmark = pytest.mark.native

N = 96
PROMPTS = Path(__file__).parents[2] / "bench/prompts/held_out.json"


class Logits(NamedTuple):
    trunk: Floats
    mtp: Floats


def logits(path: Path) -> Logits:
    """Of trunk and MTP block on held-out text: F32 cache, no flash attention, one thread."""
    options = ContextOptions(N, 1, N, N, n_threads=1, hidden=True, strict=True)
    with Model(str(path), ModelOptions(load_mtp=True)) as model:
        text = "\n".join(json.loads(PROMPTS.read_text())[:12])
        tokens = model.vocab.tokenize(text, add_special=True)[:N]
        assert len(tokens) == N
        (trunk,) = model.context(options).decode([Rows(0, 0, tokens, N)]).outputs
        assert trunk.hidden is not None
        trunk_logits, hidden = trunk.logits.copy(), trunk.hidden.copy()
        mtp = model.context(ContextOptions(N, 1, N, N, n_threads=1, is_mtp=True, strict=True))
        (block,) = mtp.decode([Rows(0, 1, tokens[1:], N - 1, hidden[:-1])]).outputs
        return Logits(trunk_logits, block.logits.copy())


@pytest.mark.parametrize(
    "widening",
    [Widening(2, 1000, 0, 192), Widening(0, 768, 2, 320), Widening(1, 896, 1, 512)],
    ids=["dense", "moe", "both"],
)
def test_widening_keeps_the_logits(widening: Widening, tmp_path: Path) -> None:
    demo = logits(demo_model(kind="f32"))
    wide = tmp_path / "wide.gguf"
    convert(widen(tmp_path / "checkpoint", widening), wide, ConvertOptions(type="f32"))
    for ours, theirs in zip(logits(wide), demo, strict=True):
        assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()


def test_a_widened_checkpoint_has_the_layers_and_widths_it_was_asked_for(tmp_path: Path) -> None:
    folder = widen(tmp_path / "wide", Widening(1, 896, 2, 512))
    config = json.loads((folder / "config.json").read_text())
    assert config["num_hidden_layers"] == 9
    assert config["first_k_dense_replace"] == 2
    with plan(folder, ConvertOptions(type="bf16")) as job:
        shapes = {t.tensor.name: t.tensor.shape for t in job.tensors}
    assert job.account.mtp_block == 9
    assert shapes["blk.1.ffn_down.weight"] == (256, 896)
    assert shapes["blk.8.ffn_gate_exps.weight"] == (8, 512, 256)
    assert shapes["blk.9.ffn_up_shexp.weight"] == (512, 256)


def test_added_layers_route_to_every_expert(tmp_path: Path) -> None:
    """Otherwise rows would wake the same experts, and a row would look cheap."""
    from gguf_mtp.converters.checkpoint import Checkpoint

    folder = widen(tmp_path / "wide", Widening(0, 768, 1, 192))
    with Checkpoint(folder) as checkpoint:
        tensor = checkpoint.tensors["model.layers.6.mlp.gate.weight"]
        raw = np.empty(tensor.n_bytes // 2, np.uint16)
        checkpoint.read_into(tensor, 0, raw.view(np.uint8).data)
    router = (raw.astype(np.uint32) << 16).view(np.float32).reshape(tensor.shape)
    rows = np.random.default_rng(0).normal(size=(400, router.shape[1]))
    counts = np.bincount(np.argmax(rows @ router.T, axis=1), minlength=8)
    assert counts.min() >= 20


def test_the_source_is_left_as_it_was(tmp_path: Path) -> None:
    before = {p.name: p.stat().st_mtime_ns for p in CHECKPOINT.iterdir()}
    widen(tmp_path / "wide", Widening(1, 896, 0, 192))
    assert {p.name: p.stat().st_mtime_ns for p in CHECKPOINT.iterdir()} == before


@pytest.mark.parametrize(("kind", "least"), [("dense-bf16", 0.4e9), ("moe-q8_0", 0.36e9)])
def test_kinds_are_larger_than_a_cache(kind: str, least: float, tmp_path: Path) -> None:
    type_, widening = KINDS[kind]
    with plan(widen(tmp_path / kind, widening), ConvertOptions(type=type_)) as job:
        assert job.account.n_bytes > least
