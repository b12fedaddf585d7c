"""Which ggml type each tensor gets: llama-quantize's mixes for the trunk, a sharp drafter.

The trunk follows llama.cpp's `llama_tensor_get_type_impl` for the tensors of MLA architectures (its
attn_q/k/v rules never apply to them). The MTP block deviates on purpose: a 4-bit block costs most
of the acceptance and is 2 % of the file, so its attention, shared expert and `nextn.*` stay at q8_0
or better and its routed experts at q4_k or better.

It knows nothing of bytes: shapes in, types out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from gguf import GGML_QUANT_SIZES, LlamaFileType
from gguf import GGMLQuantizationType as T

from ..errors import ConversionError
from .checkpoint import FP4, read_text
from .tensors import Adapted, OutputTensor

_F = LlamaFileType


class Recipe(NamedTuple):
    """A `--type`: the type most tensors get, and the file type that the mix is filed under."""

    type: T
    file_type: LlamaFileType


RECIPES = {
    "f32": Recipe(T.F32, _F.ALL_F32),
    "f16": Recipe(T.F16, _F.MOSTLY_F16),
    "bf16": Recipe(T.BF16, _F.MOSTLY_BF16),
    "q8_0": Recipe(T.Q8_0, _F.MOSTLY_Q8_0),
    "q4_0": Recipe(T.Q4_0, _F.MOSTLY_Q4_0),
    "q4_1": Recipe(T.Q4_1, _F.MOSTLY_Q4_1),
    "q5_0": Recipe(T.Q5_0, _F.MOSTLY_Q5_0),
    "q5_1": Recipe(T.Q5_1, _F.MOSTLY_Q5_1),
    "q2_k": Recipe(T.Q2_K, _F.MOSTLY_Q2_K),
    "q2_k_s": Recipe(T.Q2_K, _F.MOSTLY_Q2_K_S),
    "q3_k": Recipe(T.Q3_K, _F.MOSTLY_Q3_K_M),
    "q3_k_s": Recipe(T.Q3_K, _F.MOSTLY_Q3_K_S),
    "q3_k_m": Recipe(T.Q3_K, _F.MOSTLY_Q3_K_M),
    "q3_k_l": Recipe(T.Q3_K, _F.MOSTLY_Q3_K_L),
    "q4_k": Recipe(T.Q4_K, _F.MOSTLY_Q4_K_M),
    "q4_k_s": Recipe(T.Q4_K, _F.MOSTLY_Q4_K_S),
    "q4_k_m": Recipe(T.Q4_K, _F.MOSTLY_Q4_K_M),
    "q5_k": Recipe(T.Q5_K, _F.MOSTLY_Q5_K_M),
    "q5_k_s": Recipe(T.Q5_K, _F.MOSTLY_Q5_K_S),
    "q5_k_m": Recipe(T.Q5_K, _F.MOSTLY_Q5_K_M),
    "q6_k": Recipe(T.Q6_K, _F.MOSTLY_Q6_K),
    "iq4_nl": Recipe(T.IQ4_NL, _F.MOSTLY_IQ4_NL),
    "iq4_xs": Recipe(T.IQ4_XS, _F.MOSTLY_IQ4_XS),
    "iq3_m": Recipe(T.IQ3_S, _F.MOSTLY_IQ3_M),
    "iq3_s": Recipe(T.IQ3_S, _F.MOSTLY_IQ3_S),
    "iq3_xs": Recipe(T.IQ3_S, _F.MOSTLY_IQ3_XS),
    "iq3_xxs": Recipe(T.IQ3_XXS, _F.MOSTLY_IQ3_XXS),
    "iq2_m": Recipe(T.IQ2_S, _F.MOSTLY_IQ2_M),
    "iq2_s": Recipe(T.IQ2_XS, _F.MOSTLY_IQ2_S),
    "iq2_xs": Recipe(T.IQ2_XS, _F.MOSTLY_IQ2_XS),
    "iq2_xxs": Recipe(T.IQ2_XXS, _F.MOSTLY_IQ2_XXS),
    "iq1_m": Recipe(T.IQ1_M, _F.MOSTLY_IQ1_M),
    "iq1_s": Recipe(T.IQ1_S, _F.MOSTLY_IQ1_S),
    "tq1_0": Recipe(T.TQ1_0, _F.MOSTLY_TQ1_0),
    "tq2_0": Recipe(T.TQ2_0, _F.MOSTLY_TQ2_0),
    "mxfp4": Recipe(T.MXFP4, _F.MOSTLY_MXFP4_MOE),
}
# What one tensor may be given by name: everything ggml_quantize_chunk writes.
TENSOR_TYPES = {
    t.name.lower(): t
    for t in (
        T.F32, T.F16, T.BF16, T.Q8_0, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1,
        T.Q2_K, T.Q3_K, T.Q4_K, T.Q5_K, T.Q6_K, T.IQ4_NL, T.IQ4_XS, T.IQ3_S, T.IQ3_XXS,
        T.IQ2_S, T.IQ2_XS, T.IQ2_XXS, T.IQ1_M, T.IQ1_S, T.TQ1_0, T.TQ2_0, T.MXFP4,
    )
}  # fmt: skip

_FLOATS = (T.F32, T.F16, T.BF16)
_AT_LEAST_Q4_K = (T.Q4_K, T.Q5_0, T.Q5_1, T.Q5_K, T.Q6_K, T.Q8_0, *_FLOATS)
_SMALLER_BLOCK = {
    T.Q2_K: T.Q4_0, T.Q3_K: T.Q4_0, T.Q4_K: T.Q5_0, T.Q5_K: T.Q5_1, T.Q6_K: T.Q8_0,
    T.IQ1_S: T.IQ4_NL, T.IQ1_M: T.IQ4_NL, T.IQ2_XXS: T.IQ4_NL, T.IQ2_XS: T.IQ4_NL,
    T.IQ2_S: T.IQ4_NL, T.IQ3_XXS: T.IQ4_NL, T.IQ3_S: T.IQ4_NL, T.IQ4_XS: T.IQ4_NL,
    T.TQ1_0: T.Q4_0, T.TQ2_0: T.Q4_0,
}  # fmt: skip
_ONE_BIT = frozenset({_F.MOSTLY_IQ1_S, _F.MOSTLY_IQ1_M})
_TWO_BITS = frozenset({_F.MOSTLY_IQ2_XXS, _F.MOSTLY_IQ2_XS})
_MORE_THAN_TWO = frozenset({_F.MOSTLY_IQ2_S, _F.MOSTLY_IQ2_M})
_SMALL = _ONE_BIT | _TWO_BITS | _MORE_THAN_TWO
"""File types with rules of their own: by how many bits they have."""
_TERNARY = frozenset({_F.MOSTLY_TQ1_0, _F.MOSTLY_TQ2_0})
_WITH_8_EXPERTS = (
    _F.MOSTLY_Q2_K, _F.MOSTLY_Q3_K_S, _F.MOSTLY_Q3_K_M, _F.MOSTLY_Q4_K_S, _F.MOSTLY_Q4_K_M,
    _F.MOSTLY_IQ4_NL, _F.MOSTLY_IQ4_XS, _F.MOSTLY_IQ3_XS, _F.MOSTLY_IQ3_XXS, _F.MOSTLY_IQ3_S,
    _F.MOSTLY_IQ3_M,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class QuantOptions:
    """What the user asks for. `overrides` are (pattern, type), the first that matches wins."""

    recipe: Recipe
    overrides: Sequence[tuple[re.Pattern[str], T]] = ()
    draft_head: T | None = None
    has_imatrix: bool = False


class TypeChoice(NamedTuple):
    types: list[T]
    notes: list[str]


def parse_recipe(name: str) -> Recipe:
    """Raises `ConversionError` with the known names."""
    if name.lower() not in RECIPES:
        raise ConversionError(f"unknown type {name!r}; known types: {', '.join(RECIPES)}")
    return RECIPES[name.lower()]


def parse_type(name: str) -> T:
    """Raises `ConversionError` with the known names."""
    if name.lower() not in TENSOR_TYPES:
        known = ", ".join(TENSOR_TYPES)
        raise ConversionError(f"unknown tensor type {name!r}; known types: {known}")
    return TENSOR_TYPES[name.lower()]


def parse_override(text: str) -> tuple[re.Pattern[str], T]:
    """`PATTERN=TYPE`. Raises `ConversionError` when it is not that."""
    pattern, equals, name = text.rpartition("=")
    if not equals or not pattern:
        raise ConversionError(f"{text!r} is not PATTERN=TYPE")
    try:
        return re.compile(pattern), parse_type(name)
    except re.error as error:
        raise ConversionError(f"{pattern!r} is not a regular expression: {error}") from None


def read_overrides(path: Path) -> tuple[str, ...]:
    """A recipe file: one PATTERN=TYPE in a line, as `llama-quantize --tensor-type-file` takes them;
    what follows a `#` is a remark. Raises `ConversionError` with the line that is none."""
    lines = [line.split("#", 1)[0].strip() for line in read_text(path).splitlines()]
    for number, line in enumerate(lines, 1):
        try:
            _ = parse_override(line) if line else None
        except ConversionError as error:
            raise ConversionError(f"{path}, line {number}: {error}") from None
    return tuple(filter(None, lines))


def check_overrides(wish: QuantOptions, tensors: Iterable[OutputTensor]) -> None:
    """Raises `ConversionError` for a pattern that matches none of all tensors written."""
    names = [tensor.name for tensor in tensors]
    for pattern, type_ in wish.overrides:
        if not any(map(pattern.search, names)):
            raise ConversionError(
                f"--tensor-type {pattern.pattern}={type_.name.lower()} matches no tensor; "
                "--dry-run lists their names"
            )


def choose(adapted: Adapted, wish: QuantOptions) -> TypeChoice:
    """A type for every tensor in `adapted.tensors`, and sentences about rows that did not fit."""
    types, misfits = [], Counter[tuple[str, int, T, T]]()
    mix = _Mix(adapted, wish)
    for tensor in adapted.tensors:
        wanted = mix.wanted(tensor)
        type_ = fitting(wanted, tensor.n_per_row)
        if type_ is not wanted:
            kind = re.sub(r"^blk\.\d+\.", "", tensor.name)
            misfits[kind, tensor.n_per_row, wanted, type_] += 1
        types.append(type_)
    notes = [
        f"{kind}: rows of {n} cannot be {wanted.name.lower()}, so {type_.name.lower()} is used "
        f"({count} tensor{'s' * (count > 1)})"
        for (kind, n, wanted, type_), count in misfits.items()
    ]
    return TypeChoice(types, notes)


def fitting(type_: T, n_per_row: int) -> T:
    """The type, or what llama-quantize falls back to when its blocks do not divide the row."""
    if n_per_row % GGML_QUANT_SIZES[type_][0] == 0:
        return type_
    smaller = _SMALLER_BLOCK.get(type_, type_)
    return smaller if n_per_row % GGML_QUANT_SIZES[smaller][0] == 0 else T.F16


def is_quantisable(tensor: OutputTensor) -> bool:
    """Norms, routers (of experts and of keys), biases, and what mixes V4's residual streams and
    compresses its keys stay F32."""
    name = tensor.name
    return (
        sum(n > 1 for n in tensor.shape) > 1
        and name.endswith("weight")
        and "_norm.weight" not in name
        and "ffn_gate_inp.weight" not in name
        and not name.endswith(("indexer.proj.weight", "_compressor_ape.weight"))
        and ".hc_" not in name
        and "output_hc_" not in name
    )


def needs_imatrix(tensor: OutputTensor, type_: T, recipe: Recipe) -> bool:
    """Whether the type is worthless without importances (ggml aborts for the first three)."""
    if type_ in (T.IQ2_XXS, T.IQ2_XS, T.IQ1_S):
        return True
    if tensor.name in ("token_embd.weight", "output.weight"):
        return False
    if type_ in (T.IQ3_XXS, T.IQ2_S, T.IQ1_M):
        return True
    return type_ is T.Q2_K and recipe.file_type is _F.MOSTLY_Q2_K_S


def _bits(type_: T) -> float:
    """Of one weight."""
    n_weights, n_bytes = GGML_QUANT_SIZES[type_]
    return 8 * n_bytes / n_weights


def _in_order(name: str) -> tuple[int, str]:
    return int(name.split(".")[1]), name


class _Mix:
    def __init__(self, adapted: Adapted, wish: QuantOptions) -> None:
        self.wish = wish
        block = None if adapted.mtp_block is None else f"blk.{adapted.mtp_block}."
        self.drafter = "" if adapted.is_dspark else block  # what its tensors' names begin with
        self.n_expert = int(str(adapted.kv.get(f"{adapted.architecture}.expert_count", 0)))
        self.n_layer = int(str(adapted.kv[f"{adapted.architecture}.block_count"]))
        downs = [t.name for t in adapted.tensors if "ffn_down" in t.name]
        # llama-quantize counts them as it goes, layer by layer.
        self.downs = {name: i for i, name in enumerate(sorted(downs, key=_in_order))}
        self.tied = all(t.name != "output.weight" for t in adapted.tensors)

    def wanted(self, tensor: OutputTensor) -> T:
        if tensor.is_index:
            return T.I32
        if not is_quantisable(tensor):
            return T.F32
        for pattern, type_ in self.wish.overrides:
            if pattern.search(tensor.name):
                return type_
        is_drafter = self.drafter is not None and tensor.name.startswith(self.drafter)
        chosen = self._drafter(tensor) if is_drafter else self._trunk(tensor)
        # FP4 weights are MXFP4 without a loss, in no more bits than a type that would lose some.
        is_fp4 = tensor.pieces[0].weight.tensor.dtype == FP4
        if is_fp4 and chosen not in _FLOATS and _bits(chosen) >= _bits(T.MXFP4):
            return T.MXFP4
        return chosen

    def _drafter(self, tensor: OutputTensor) -> T:
        if tensor.name.endswith("nextn.shared_head_head.weight") and self.wish.draft_head:
            return self.wish.draft_head
        base = self._trunk(tensor)
        if "_exps." in tensor.name:
            return base if base in _AT_LEAST_Q4_K else T.Q4_K
        return base if base in _FLOATS else T.Q8_0

    def _trunk(self, tensor: OutputTensor) -> T:
        base, file_type = self.wish.recipe
        name = tensor.name
        if base in _FLOATS:
            return base
        if name == "output.weight" or (self.tied and name == "token_embd.weight"):
            misfit = tensor.n_per_row % GGML_QUANT_SIZES[base][0] != 0
            if misfit or base in (T.Q8_0, T.MXFP4):
                return T.Q8_0
            is_small = file_type in _SMALL or file_type is _F.MOSTLY_IQ3_XXS
            return T.Q5_K if is_small else T.Q6_K
        if base is T.MXFP4:
            return T.MXFP4 if len(tensor.shape) == 3 and tensor.shape[0] > 1 else T.Q8_0
        if name == "token_embd.weight":
            return self._embedding(base, file_type)
        if file_type in _SMALL:
            return self._small(name, base, file_type)
        if "ffn_down" in name:
            return self._down(base, file_type, int(name.split(".")[1]))
        if "ffn_gate" in name or "ffn_up" in name:
            return self._gate(base, file_type, int(name.split(".")[1]))
        if "attn_output.weight" in name:
            return self._attention_output(base, file_type)
        if "attn_q.weight" in name:
            smaller = {_F.MOSTLY_IQ3_XS: T.IQ3_XXS, _F.MOSTLY_IQ3_XXS: T.IQ2_S}
            return smaller.get(file_type, base)
        return base

    def _embedding(self, base: T, file_type: LlamaFileType) -> T:
        if file_type in _ONE_BIT | _TWO_BITS:
            return T.Q2_K
        if file_type in _MORE_THAN_TWO or file_type is _F.MOSTLY_IQ3_XXS:
            return T.IQ3_S
        return T.Q4_K if file_type in _TERNARY else base

    def _small(self, name: str, base: T, file_type: LlamaFileType) -> T:
        """The rules of file types with one and two bits."""
        sharper = T.IQ3_S if file_type in _MORE_THAN_TWO else T.Q2_K
        if "ffn_down" in name:
            return sharper if self.downs[name] < self.n_layer // 8 else base
        if "attn_output.weight" in name:
            if self.n_expert == 8:
                return T.Q5_K
            if file_type in _ONE_BIT:
                return T.IQ2_XXS
            return T.IQ3_S if file_type in _MORE_THAN_TWO else base
        return base

    def _gate(self, base: T, file_type: LlamaFileType, i: int) -> T:
        is_inner = self.n_layer // 8 <= i < 7 * self.n_layer // 8
        return T.IQ3_XXS if file_type is _F.MOSTLY_IQ3_XS and is_inner else base

    def _down(self, base: T, file_type: LlamaFileType, i: int) -> T:
        n = self.n_layer
        early = i < n // 8
        more_bits = early or i >= 7 * n // 8 or (i - n // 8) % 3 == 2
        imatrix = self.wish.has_imatrix
        match file_type:
            case _F.MOSTLY_Q2_K:
                return T.Q3_K
            case _F.MOSTLY_Q2_K_S if early:
                return T.Q4_K
            case _F.MOSTLY_Q3_K_M:
                return T.Q5_K if i < n // 16 else T.Q4_K
            case _F.MOSTLY_Q3_K_L:
                return T.Q5_K
            case _F.MOSTLY_IQ3_XXS if not imatrix:
                return T.Q4_K if early else T.Q3_K
            case _F.MOSTLY_IQ3_M if early or (self.n_expert == 8 and more_bits):
                return T.Q4_K
            case _F.MOSTLY_Q4_K_M | _F.MOSTLY_Q5_K_M if more_bits:
                return T.Q6_K
            case _F.MOSTLY_Q4_K_S if early:
                return T.Q5_K
            case _F.MOSTLY_IQ4_NL | _F.MOSTLY_IQ4_XS if early and not imatrix:
                return T.Q5_K
            case _F.MOSTLY_Q4_0 if early and imatrix:
                return T.Q4_1
            case _F.MOSTLY_Q5_0 if early and imatrix:
                return T.Q5_1
            case _:
                return base

    def _attention_output(self, base: T, file_type: LlamaFileType) -> T:
        if self.n_expert == 8:
            return T.Q5_K if file_type in _WITH_8_EXPERTS else base
        return {
            _F.MOSTLY_Q2_K: T.Q3_K,
            _F.MOSTLY_IQ3_XXS: T.IQ3_S,
            _F.MOSTLY_Q3_K_M: T.Q4_K,
            _F.MOSTLY_Q3_K_L: T.Q5_K,
            _F.MOSTLY_IQ3_M: T.Q4_K,
        }.get(file_type, base)


def bytes_by_type(types: Iterable[T], n_bytes: Iterable[int]) -> dict[str, int]:
    """Total bytes of each type, largest first."""
    total = Counter[str]()
    for type_, n in zip(types, n_bytes, strict=True):
        total[type_.name] += n
    return dict(total.most_common())
