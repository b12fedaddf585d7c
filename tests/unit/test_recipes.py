"""Which type each tensor gets: overrides, the sharp drafter, fallbacks, importances."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as T
from gguf import GGUFWriter

from gguf_mtp.converters.convert import ConvertOptions, plan
from gguf_mtp.converters.imatrix import Imatrix
from gguf_mtp.converters.recipes import RECIPES, fitting, is_quantisable, read_overrides
from gguf_mtp.converters.tensors import OutputTensor
from gguf_mtp.errors import ConversionError
from tests.support.checkpoints import changed_demo, holes
from tests.support.imatrix_files import Values, write_gguf, write_legacy


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's headers: types need no more."""
    return changed_demo(tmp_path_factory.mktemp("recipes"), lambda *_: None, holes)


def types(source: Path, options: ConvertOptions) -> dict[str, str]:
    with plan(source, options) as job:
        return {t.tensor.name: t.type.name for t in job.tensors}


def tensor(name: str, *shape: int) -> OutputTensor:
    return OutputTensor(name, shape, ())


@pytest.mark.parametrize(
    ("type_", "n", "wanted"),
    [
        (T.Q4_K, 512, T.Q4_K), (T.Q4_K, 128, T.Q5_0), (T.Q5_K, 128, T.Q5_1),
        (T.Q6_K, 128, T.Q8_0), (T.Q2_K, 128, T.Q4_0), (T.Q3_K, 128, T.Q4_0),
        (T.IQ4_XS, 128, T.IQ4_NL), (T.IQ2_XXS, 128, T.IQ4_NL), (T.IQ3_S, 96, T.IQ4_NL),
        (T.Q8_0, 128, T.Q8_0), (T.Q4_K, 100, T.F16), (T.Q8_0, 100, T.F16), (T.BF16, 7, T.BF16),
    ],
)  # fmt: skip
def test_fallback_is_llama_quantizes(type_: T, n: int, wanted: T) -> None:
    assert fitting(type_, n) is wanted


@pytest.mark.parametrize(
    ("name", "shape", "is_it"),
    [
        ("blk.0.attn_q_a.weight", (96, 256), True),
        ("blk.0.ffn_up_exps.weight", (8, 192, 256), True),
        ("blk.0.attn_norm.weight", (256,), False),
        ("blk.0.ffn_gate_inp.weight", (8, 256), False),
        ("blk.0.exp_probs_b.bias", (8,), False),
        ("blk.6.nextn.shared_head_norm.weight", (4, 256), False),
        ("blk.0.attn_q_a.weight", (1, 256), False),  # ggml counts no dimension of one
    ],
)
def test_what_is_quantised(name: str, shape: tuple[int, ...], is_it: bool) -> None:
    assert is_quantisable(tensor(name, *shape)) is is_it


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_drafter_stays_sharp(source: Path, recipe: str) -> None:
    """It needs no importances, whatever the trunk's types do."""
    options = ConvertOptions(recipe, tensor_types=(r"^blk\.[0-5]\.=q8_0",))
    chosen = {n: t for n, t in types(source, options).items() if "blk.6." in n}
    base = RECIPES[recipe].type
    sharp = base.name if base in (T.F32, T.F16, T.BF16) else "Q8_0"
    for name, type_ in chosen.items():
        if re.search("norm|ffn_gate_inp|bias", name):
            assert type_ == "F32", name
        elif "_exps" in name:
            assert type_ in ("F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K", "Q5_1", "Q5_0", "Q4_K")
        else:
            assert type_ == sharp, name


def test_experts_of_the_drafter_follow_a_better_trunk(source: Path) -> None:
    for recipe, wanted in (("q2_k", "Q4_K"), ("q4_k_s", "Q4_K"), ("q6_k", "Q6_K"), ("f16", "F16")):
        assert types(source, ConvertOptions(recipe))["blk.6.ffn_up_exps.weight"] == wanted


def test_a_recipe_is_a_file_of_overrides(source: Path, tmp_path: Path) -> None:
    """As dynamic quantisations are published; what the command line says comes first."""
    recipe = tmp_path / "recipe.txt"
    recipe.write_text(
        "# experts of the first layers\n\nblk\\.[12]\\..*_exps=q6_k\n_exps=iq4_xs  # the rest\n"
    )
    overrides = (r"blk\.2\..*down_exps=q8_0", *read_overrides(recipe))
    assert overrides[1:] == (r"blk\.[12]\..*_exps=q6_k", "_exps=iq4_xs")
    chosen = types(source, ConvertOptions("q4_k_m", tensor_types=overrides))
    assert chosen["blk.1.ffn_up_exps.weight"] == "Q6_K"
    assert chosen["blk.2.ffn_down_exps.weight"] == "Q8_0"
    assert chosen["blk.3.ffn_up_exps.weight"] == "IQ4_XS"
    recipe.write_text("fine=q8_0\nwrong\n")
    with pytest.raises(ConversionError, match=r"recipe.txt, line 2: 'wrong' is not PATTERN=TYPE"):
        read_overrides(recipe)
    with pytest.raises(ConversionError, match="is missing"):
        read_overrides(tmp_path / "none.txt")


def test_first_matching_override_wins(source: Path) -> None:
    options = ConvertOptions("q4_k_m", tensor_types=(r"blk\.2\..*_exps=q8_0", "_exps=q5_k"))
    chosen = types(source, options)
    assert chosen["blk.2.ffn_up_exps.weight"] == "Q8_0"
    assert chosen["blk.3.ffn_up_exps.weight"] == "Q5_K"
    assert chosen["blk.6.ffn_up_exps.weight"] == "Q5_K"  # the drafter obeys too
    assert chosen["blk.3.ffn_up_shexp.weight"] == "Q4_K"


def test_overrides_reach_float_files_and_the_drafter_but_no_norm(source: Path) -> None:
    chosen = types(source, ConvertOptions("bf16", tensor_types=(".=q8_0",)))
    assert chosen["token_embd.weight"] == chosen["blk.6.nextn.eh_proj.weight"] == "Q8_0"
    assert chosen["blk.6.nextn.enorm.weight"] == chosen["blk.3.ffn_gate_inp.weight"] == "F32"


def test_an_override_that_does_not_fit_falls_back_and_says_so(source: Path) -> None:
    options = ConvertOptions("q8_0", tensor_types=("attn_k_b=q4_k",))
    with plan(source, options) as job:
        chosen = {t.tensor.name: t.type.name for t in job.tensors}
        assert job.account.notes == (
            "attn_k_b.weight: rows of 32 cannot be q4_k, so q5_0 is used (7 tensors)",
        )
    assert chosen["blk.0.attn_k_b.weight"] == "Q5_0"


def test_a_pattern_with_an_equals_sign(source: Path) -> None:
    chosen = types(source, ConvertOptions("q8_0", tensor_types=("(?=token)token_embd=f16",)))
    assert chosen["token_embd.weight"] == "F16"


# -- importance matrices ---------------------------------------------------------------------------

UP = tensor("blk.2.ffn_up_exps.weight", 2, 3, 4)


@pytest.fixture
def values() -> Values:
    return {UP.name: (np.array([2, 3, 4, 5, 1, 1, 1, 1], np.float32), 2)}


def test_gguf_form(tmp_path: Path, values: Values) -> None:
    write_gguf(tmp_path / "imatrix", values)
    found = Imatrix(tmp_path / "imatrix").values(UP)
    assert found is not None
    assert found.tolist() == [[2, 3, 4, 5], [1, 1, 1, 1]]
    assert Imatrix(tmp_path / "imatrix").values(tensor("other", 2, 4)) is None


def test_legacy_form(tmp_path: Path, values: Values) -> None:
    write_legacy(tmp_path / "imatrix", values)
    found = Imatrix(tmp_path / "imatrix").values(UP)
    assert found is not None
    assert found.tolist() == [[2, 3, 4, 5], [1, 1, 1, 1]]


def test_sizes_must_agree(tmp_path: Path, values: Values) -> None:
    write_gguf(tmp_path / "imatrix", values)
    with pytest.raises(ConversionError, match=r"has 8 values for blk\.2.*, which needs 12"):
        Imatrix(tmp_path / "imatrix").values(tensor(UP.name, 3, 3, 4))


def test_the_embedding_may_differ_in_size(tmp_path: Path) -> None:
    write_gguf(tmp_path / "imatrix", {"token_embd.weight": (np.ones(8, np.float32), 1)})
    assert Imatrix(tmp_path / "imatrix").values(tensor("token_embd.weight", 10, 4)) is None


def test_values_must_be_finite(tmp_path: Path) -> None:
    write_legacy(tmp_path / "imatrix", {UP.name: (np.full(8, np.nan, np.float32), 2)})
    with pytest.raises(ConversionError, match="is not finite"):
        Imatrix(tmp_path / "imatrix").values(UP)


def no_counts(path: Path) -> None:
    writer = GGUFWriter(path, "imatrix")
    writer.add_tensor("x.in_sum2", np.ones((1, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def cut(path: Path) -> None:
    write_gguf(path, {UP.name: (np.ones(8, np.float32), 2)})
    path.write_bytes(path.read_bytes()[:200])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (no_counts, "has sums for x, but no counts"),
        (cut, "is a damaged GGUF file"),
        (lambda p: p.write_bytes(b""), "is not an importance matrix"),
        (lambda p: p.write_bytes(b"\xff" * 64), "is not an importance matrix"),
        (lambda p: p.write_bytes(struct.pack("<i", 0)), "has no entries"),
        (lambda p: p.write_bytes(struct.pack("<ii1sii", 1, 1, b"x", 1, 9)), "or is damaged"),
    ],
)  # fmt: skip
def test_what_is_no_importance_matrix(
    tmp_path: Path, make: Callable[[Path], object], says: str
) -> None:
    make(tmp_path / "imatrix")
    with pytest.raises(ConversionError, match=says):
        Imatrix(tmp_path / "imatrix")


def test_tensors_without_importances_are_named(source: Path, tmp_path: Path) -> None:
    write_legacy(tmp_path / "imatrix", {"output.weight": (np.ones(256, np.float32), 1)})
    with plan(source, ConvertOptions("q8_0", imatrix=tmp_path / "imatrix")) as job:
        (note,) = job.account.notes
    assert "has no values for 83 tensors; the first is token_embd.weight" in note


def test_a_type_that_needs_importances_for_a_tensor_without(source: Path, tmp_path: Path) -> None:
    write_legacy(tmp_path / "imatrix", {"output.weight": (np.ones(256, np.float32), 1)})
    options = ConvertOptions(
        "q8_0", tensor_types=("blk.1.ffn_up_exps=iq2_xs",), imatrix=tmp_path / "imatrix"
    )
    with pytest.raises(ConversionError, match=r"blk\.1.* as iq2_xs needs .* has none for it"):
        types(source, options)


def test_a_pattern_that_matches_no_tensor_is_refused(source: Path) -> None:
    options = ConvertOptions("q8_0", tensor_types=("attn_k_b=q8_0", "atn_k=q4_0"))
    with pytest.raises(ConversionError, match="--tensor-type atn_k=q4_0 matches no tensor"):
        types(source, options)
