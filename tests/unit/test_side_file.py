"""Whether a block belongs to a model: each difference is one sentence, found without weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gguf_mtp.errors import UnsupportedModel
from gguf_mtp.gguf import model_facts, side_file
from tests.support.gguf_files import Model

KEPT = ("token_embd.weight", "output_norm.weight", "output.weight")


def trunk(path: Path) -> Path:
    model = Model()
    del model.hyper["nextn_predict_layers"]
    model.hyper["block_count"] = 2
    model.shapes = {n: s for n, s in model.shapes.items() if not n.startswith("blk.2.")}
    return model.write(path)


def side(path: Path, change: Callable[[Model], object] = lambda _: None) -> Path:
    model = Model()
    model.shapes = {n: s for n, s in model.shapes.items() if n in KEPT or n.startswith("blk.2.")}
    change(model)
    return model.write(path)


def check(folder: Path, change: Callable[[Model], object] = lambda _: None) -> list[str]:
    model = model_facts.read(trunk(folder / "trunk.gguf"))
    return side_file.check(model, side_file.read(side(folder / "mtp.gguf", change)))


def test_a_block_of_the_model(tmp_path: Path) -> None:
    assert check(tmp_path) == []


def test_both_spellings_of_a_trunk_are_one(tmp_path: Path) -> None:
    """Some files without the block still announce and count it."""
    model = Model()
    model.shapes = {n: s for n, s in model.shapes.items() if not n.startswith("blk.2.")}
    facts = model_facts.read(model.write(tmp_path / "announced.gguf"))
    assert (facts.n_layer, facts.can_draft) == (2, False)
    assert side_file.check(facts, side_file.read(side(tmp_path / "mtp.gguf"))) == []


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: m.hyper.update({"attention.layer_norm_rms_epsilon": 1e-5}), "rms_epsilon is"),
        (lambda m: m.hyper.update({"expert_used_count": 1}), "expert_used_count is 1"),
        (lambda m: m.hyper.update({"expert_gating_func": 1}), "expert_gating_func is 1"),
        (lambda m: m.tokens.__setitem__(299, "<other>"), "differ in their token texts"),
        (lambda m: m.shapes.pop("output.weight"), "no output.weight"),
        (lambda m: m.shapes.pop("output_norm.weight"), "holds no output_norm.weight"),
    ],
)  # fmt: skip
def test_each_difference_is_told(
    tmp_path: Path, change: Callable[[Model], object], why: str
) -> None:
    with pytest.raises(UnsupportedModel, match=f"does not belong to .*{why}"):
        check(tmp_path, change)


def test_what_the_model_does_not_say_is_a_remark(tmp_path: Path) -> None:
    [remark] = check(tmp_path, lambda m: m.hyper.update({"rope.scaling.factor": 5.0}))
    assert "rope.scaling.factor 5.0" in remark


def test_other_vocabulary_sizes(tmp_path: Path) -> None:
    def longer(model: Model) -> None:
        model.tokens.append("<one more>")
        model.shapes |= {"token_embd.weight": (32, 301), "output.weight": (32, 301)}

    with pytest.raises(UnsupportedModel, match="has 301 tokens, but the model's has 300"):
        check(tmp_path, longer)


def poke(path: Path, name: str, values: np.ndarray) -> None:
    [tensor] = [t for t in model_facts.read_any(path).tensors if t.name == name]
    assert values.nbytes == tensor.n_bytes
    with path.open("r+b") as file:
        file.seek(tensor.offset)
        file.write(values.tobytes())


def with_weights(folder: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    """Checks a trunk and a side file that hold the same weights but for `change`."""
    rng = np.random.default_rng(0)
    weights = {
        name: rng.standard_normal(n, np.float32)
        for name, n in (("token_embd", 9600), ("output", 9600), ("output_norm", 32))
    }
    paths = trunk(folder / "trunk.gguf"), side(folder / "mtp.gguf")
    for path in paths:
        for name, values in weights.items():
            poke(path, f"{name}.weight", values)
        change(weights)
    side_file.check(model_facts.read(paths[0]), side_file.read(paths[1]))


def test_equal_weights(tmp_path: Path) -> None:
    with_weights(tmp_path, lambda _: None)


def test_the_norm_must_be_equal(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="output norms differ"):
        with_weights(tmp_path, lambda w: w["output_norm"].__setitem__(3, 1.0))


@pytest.mark.parametrize("name", ["token_embd", "output"])
def test_rows_must_be_alike(tmp_path: Path, name: str) -> None:
    def noisy(weights: dict[str, np.ndarray]) -> None:
        weights[name] += 0.2 * np.random.default_rng(1).standard_normal(9600).astype(np.float32)

    def other(weights: dict[str, np.ndarray]) -> None:
        weights[name] = np.random.default_rng(1).standard_normal(9600).astype(np.float32)

    with_weights(tmp_path, noisy)
    with pytest.raises(UnsupportedModel, match=rf"{name}.weight have a cosine .* -?0.0\d, but"):
        with_weights(tmp_path, other)


def test_a_missing_low_rank_is_told(tmp_path: Path) -> None:
    model = Model()
    del model.hyper["nextn_predict_layers"]
    model.hyper |= {"block_count": 2, "attention.q_lora_rank": 8}
    model.shapes = {n: s for n, s in model.shapes.items() if not n.startswith("blk.2.")}
    facts = model_facts.read(model.write(tmp_path / "t.gguf"))
    with pytest.raises(UnsupportedModel, match="q_lora_rank is 16, but the model's is 8"):
        side_file.check(facts, side_file.read(side(tmp_path / "mtp.gguf")))


def test_the_sibling_that_belongs_is_taken(tmp_path: Path) -> None:
    model = model_facts.read(trunk(tmp_path / "trunk.gguf"))
    assert side_file.find(model) == (None, [])
    side(tmp_path / "mtp-a.gguf", lambda m: m.hyper.update({"expert_used_count": 1}))
    found, refusals = side_file.find(model)
    assert found is None
    assert "expert_used_count" in refusals[0]
    side(tmp_path / "mtp-b.gguf")
    found, refusals = side_file.find(model)
    assert found is not None
    assert (Path(found.path).name, refusals) == ("mtp-b.gguf", [])


def test_shards_know_their_own_side_file(tmp_path: Path) -> None:
    path = trunk(tmp_path / "trunk.gguf")
    shard = Path(path).rename(tmp_path / "s-00001-of-00006.gguf")
    own = dataclasses.replace(model_facts.read_any(shard), path=str(shard))
    side(tmp_path / "mtp-a.gguf")
    side(tmp_path / "mtp-s.gguf")
    found, _ = side_file.find(own)
    assert found is not None
    assert Path(found.path).name == "mtp-s.gguf"
