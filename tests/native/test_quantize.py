"""Types and bytes against llama-quantize's own code, run on our F32 file of the same checkpoint."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp as L
import numpy as np
import pytest
from gguf import GGMLQuantizationType as T
from gguf import GGUFReader
from numpy.typing import NDArray

from gguf_mtp.converters.convert import ConvertOptions, convert
from gguf_mtp.converters.recipes import RECIPES
from gguf_mtp.errors import ConversionError
from tests.support.checkpoints import widened
from tests.support.imatrix_files import Values, write_gguf, write_legacy

pytestmark = pytest.mark.native

N_LAYER = 3  # whether layers differ is for the real shapes to say
MTP = f"blk.{N_LAYER}."
DEMANDING = [
    "q2_k_s", "iq3_xxs", "iq2_m", "iq2_s", "iq2_xs", "iq2_xxs", "iq1_m", "iq1_s", "iq3_xs",
]  # fmt: skip
"""Those with tensors that llama-quantize makes with importances only."""
QUANTISED = [name for name in RECIPES if name not in ("f32", "f16", "bf16", *DEMANDING)]
# The other names are second names.
DISTINCT = [name for name in QUANTISED if name not in ("q3_k", "q4_k", "q5_k")]


@L.llama_log_callback
def _silence(_level: int, _text: bytes, _user: Any) -> None:
    """The package's own callback raises on pieces of UTF-8."""


class Tensor(NamedTuple):
    type: str
    shape: tuple[int, ...]
    data: NDArray[Any]


class Case(NamedTuple):
    checkpoint: Path
    f32: Path


def make_case(folder: Path, n_expert: int) -> Case:
    checkpoint = widened(folder / "checkpoint", n_expert, N_LAYER)
    convert(checkpoint, folder / "f32.gguf", ConvertOptions("f32", n_threads=2))
    return Case(checkpoint, folder / "f32.gguf")


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("widened"), 8)


@pytest.fixture(scope="module")
def case_of_4(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """llama-quantize has rules of its own for 8 experts: here they must not apply."""
    return make_case(tmp_path_factory.mktemp("widened-4"), 4)


@pytest.fixture(scope="module")
def importances(case: Case) -> Values:
    return made_up(case)


def made_up(case: Case) -> Values:
    """Made-up importances for the trunk's matrices, as llama-imatrix gives none for the block.

    The last matrix of each tensor was never used: it weighs all columns alike.
    """
    rng = np.random.default_rng(0)
    values = {}
    for tensor in GGUFReader(case.f32).tensors:
        if len(tensor.shape) > 1 and not tensor.name.startswith(MTP):
            n_matrices = int(tensor.shape[2]) if len(tensor.shape) == 3 else 1
            rows = rng.random((n_matrices, int(tensor.shape[0])), dtype=np.float32) + np.float32(1)
            rows[-1] = 1
            values[tensor.name] = rows.ravel(), n_matrices
    return values


def read(path: Path) -> dict[str, Tensor]:
    return {
        t.name: Tensor(t.tensor_type.name, tuple(map(int, t.shape)), t.data)
        for t in GGUFReader(path).tensors
    }


def llama_quantize(
    source: Path,
    out: Path,
    file_type: int,
    types: Mapping[str, str] | None = None,
    importances: Values | None = None,
) -> dict[str, Tensor]:
    """llama.cpp's own quantisation: its mix, or for the tensors in `types` that type."""
    L.llama_log_set(_silence, ctypes.c_void_p(0))
    params = L.llama_model_quantize_default_params()
    params.ftype, params.nthread = file_type, 2
    if types:
        overrides = (L.llama_model_tensor_override * (len(types) + 1))()
        for slot, (name, type_) in zip(overrides, types.items(), strict=False):
            slot.pattern, slot.type = f"^{re.escape(name)}$".encode(), T[type_]
        params.tt_overrides = overrides
    if importances:
        entries = (L.llama_model_imatrix_data * (len(importances) + 1))()
        for slot, (name, (values, _)) in zip(entries, importances.items(), strict=False):
            slot.name, slot.size = name.encode(), values.size
            slot.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        params.imatrix = entries
    assert L.llama_model_quantize(str(source).encode(), str(out).encode(), params) == 0
    return read(out)


def check_trunk(case: Case, recipe: str, folder: Path, importances: Values | None = None) -> None:
    """Trunk types are the mix's own, and wherever types agree bytes do."""
    path = None
    if importances is not None:
        path = folder / "imatrix.gguf"
        write_gguf(path, importances)
    options = ConvertOptions(recipe, imatrix=path, n_threads=2)
    convert(case.checkpoint, folder / "ours.gguf", options)
    ours = read(folder / "ours.gguf")
    # Their block is not looked at; in the types of ours it needs no importances.
    types = {n: t.type for n, t in ours.items() if n.startswith(MTP) and t.type != "F32"}
    file_type = RECIPES[recipe].file_type
    theirs = llama_quantize(case.f32, folder / "theirs.gguf", file_type, types, importances)
    assert ours.keys() == theirs.keys()
    different = {n: (t.type, theirs[n].type) for n, t in ours.items() if t.type != theirs[n].type}
    assert {n: d for n, d in different.items() if not n.startswith(MTP)} == {}
    check_bytes({n: t for n, t in ours.items() if n not in different}, theirs)


def check_bytes(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    for name, tensor in ours.items():
        assert (tensor.type, tensor.shape) == (theirs[name].type, theirs[name].shape), name
        np.testing.assert_array_equal(tensor.data, theirs[name].data, err_msg=name)


@pytest.mark.parametrize("recipe", [*DISTINCT, "f16", "bf16"])
def test_trunk_is_llama_quantizes(case: Case, recipe: str, tmp_path: Path) -> None:
    check_trunk(case, recipe, tmp_path)


@pytest.mark.parametrize("recipe", ["q2_k", "q3_k_m", "q3_k_l", "q4_k_m", "q5_k_m", "iq3_m"])
def test_trunk_with_other_than_8_experts(case_of_4: Case, recipe: str, tmp_path: Path) -> None:
    check_trunk(case_of_4, recipe, tmp_path)


@pytest.mark.parametrize(
    "recipe",
    [
        name if name == "iq3_xs" else pytest.param(name, marks=pytest.mark.slow)
        for name in DEMANDING
    ],
)
def test_trunk_with_importances(
    case: Case, importances: Values, recipe: str, tmp_path: Path
) -> None:
    check_trunk(case, recipe, tmp_path, importances)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["iq3_xxs", "iq2_m", "iq2_xxs", "iq1_m"])
def test_trunk_with_importances_and_other_than_8_experts(
    case_of_4: Case, recipe: str, tmp_path: Path
) -> None:
    check_trunk(case_of_4, recipe, tmp_path, made_up(case_of_4))


@pytest.mark.parametrize("recipe", DEMANDING)
def test_importances_are_demanded(case: Case, recipe: str, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="needs an importance matrix; use --imatrix"):
        convert(case.checkpoint, tmp_path / "m.gguf", ConvertOptions(recipe))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("recipe", ["q4_k_m", "iq4_xs", "q2_k"])
def test_drafter_bytes_are_llama_quantizes(case: Case, recipe: str, tmp_path: Path) -> None:
    """With each tensor's type prescribed, the MTP block's bytes are llama-quantize's as well."""
    convert(case.checkpoint, tmp_path / "ours.gguf", ConvertOptions(recipe, n_threads=2))
    ours = read(tmp_path / "ours.gguf")
    types = {name: t.type for name, t in ours.items()}
    file_type = RECIPES[recipe].file_type
    check_bytes(ours, llama_quantize(case.f32, tmp_path / "theirs.gguf", file_type, types))


@pytest.mark.parametrize(
    ("recipe", "form"),
    [("q4_k_m", "gguf"), ("q4_k_m", "dat"), ("q2_k_s", "gguf"), ("q5_0", "gguf")],
)
def test_importances_act_as_in_llama_quantize(
    case: Case, importances: Values, recipe: str, form: str, tmp_path: Path
) -> None:
    path = tmp_path / f"imatrix.{form}"
    write_legacy(path, importances) if form == "dat" else write_gguf(path, importances)
    options = ConvertOptions(recipe, imatrix=path, n_threads=2)
    convert(case.checkpoint, tmp_path / "ours.gguf", options)
    ours = read(tmp_path / "ours.gguf")
    file_type = RECIPES[recipe].file_type
    types = {n: t.type for n, t in ours.items() if n.startswith(MTP)}
    theirs = llama_quantize(case.f32, tmp_path / "theirs.gguf", file_type, types, importances)
    check_bytes(ours, theirs)


def test_importances_change_the_bytes(case: Case, importances: Values, tmp_path: Path) -> None:
    write_gguf(tmp_path / "imatrix.gguf", importances)
    convert(case.checkpoint, tmp_path / "plain.gguf", ConvertOptions("q4_k_s", n_threads=2))
    options = ConvertOptions("q4_k_s", imatrix=tmp_path / "imatrix.gguf", n_threads=2)
    convert(case.checkpoint, tmp_path / "weighed.gguf", options)
    plain, weighed = read(tmp_path / "plain.gguf"), read(tmp_path / "weighed.gguf")
    changed = {n for n in plain if not np.array_equal(plain[n].data, weighed[n].data)}
    assert "blk.0.attn_output.weight" in changed
    assert not any(n.startswith(MTP) for n in changed)
