"""Does an MTP block belong to a model? Everything two headers and a few rows can tell.

The block reads the model's hidden rows behind its last norm and predicts with its head: so the
norms must be equal bytes, and rows of head and embedding must point the same way whatever types
they are stored in. A block of another model would load and never have a draft accepted.

It knows nothing of llama.cpp, of layouts on disk beyond headers, or of how the block is run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gguf_mtp.errors import GgufMtpError, LoadFailed, UnsupportedModel
from gguf_mtp.gguf import model_facts
from gguf_mtp.gguf.header import raw_metadata
from gguf_mtp.types import ModelFacts, TensorInfo

__all__ = ["check", "find", "read"]

N_ROWS = 64
"""Rows that are compared of the head and of the embedding."""
SIMILAR = 0.8
"""Least mean cosine between rows of one matrix in two types; 2-bit types keep about 0.95, and rows
of two different models have about 0."""

# Without one of these equal, the block's tensors have other shapes or another meaning.
_DEFINING = (
    "embedding_length", "attention.head_count", "attention.q_lora_rank",
    "attention.kv_lora_rank", "attention.key_length_mla", "attention.value_length_mla",
    "rope.dimension_count", "expert_count", "expert_used_count", "expert_feed_forward_length",
    "expert_shared_count",
)  # fmt: skip
# What may differ: how blocks are counted, how far the context goes, how many rows are named.
_FREE = ("block_count", "nextn_predict_layers", "context_length", "vocab_size")


def read(path: str | os.PathLike[str]) -> ModelFacts:
    """The facts of a file whose MTP block shall draft for another file's model.

    Raises as `model_facts.read_any`, and `UnsupportedModel` when its block cannot draft.
    """
    side = model_facts.read_any(path)
    if not side.can_draft:
        raise UnsupportedModel(f"{side.path} cannot draft for another file: {side.reason}")
    return side


def find(
    model: ModelFacts,
    kind: str = "mtp",
    fit: Callable[[ModelFacts, Path], ModelFacts] | None = None,
) -> tuple[ModelFacts | None, list[str]]:
    """The `mtp-*.gguf` (or of another `kind`) beside a model that belongs to it, and why others do
    not, in sentences. `fit` reads one and raises where it does not belong."""
    refusals, own = [], f"{kind}-{_without_shard(model.path)}"
    found = Path(model.path).absolute().parent.glob(f"{kind}-*.gguf")
    for path in sorted(found, key=lambda path: (_without_shard(path) != own, path)):
        if path.name == Path(model.path).name:
            continue
        try:
            return (fit or _read_and_check)(model, path), []
        except GgufMtpError as error:
            refusals.append(f"{path.name} next to the model is not used: {error}")
    return None, refusals


def _read_and_check(model: ModelFacts, path: Path) -> ModelFacts:
    side = read(path)
    check(model, side)
    return side


def _without_shard(path: str | os.PathLike[str]) -> str:
    """The file's name; `a.gguf` for `a-00001-of-00003.gguf`."""
    return re.sub(r"-\d{5}-of-\d{5}(?=\.gguf$)", "", Path(path).name)


def check(model: ModelFacts, side: ModelFacts) -> list[str]:
    """Raises `UnsupportedModel` unless the block in `side` belongs to `model`.

    Returns sentences about differences that only matter to the block's accuracy.
    """
    why = _why_not_shapes(model, side) or _why_not_tokens(model, side)
    if why is None:
        why = _why_not_weights(model, side)
    if why is not None:
        raise UnsupportedModel(f"{side.path} does not belong to {model.path}: {why}")
    return _remarks(model, side)


def _why_not_shapes(model: ModelFacts, side: ModelFacts) -> str | None:
    if side.architecture != model.architecture:
        return f"its architecture is {side.architecture}, but the model's is {model.architecture}"
    if side.n_layer != model.n_layer:
        return f"its block follows {side.n_layer} layers, but the model has {model.n_layer}"
    ours, theirs = _hparams(model), _hparams(side)
    for key in (*_DEFINING, *sorted(ours.keys() & theirs.keys())):
        if not _equal(ours.get(key), theirs.get(key)):
            return f"its {key} is {theirs.get(key)}, but the model's is {ours.get(key)}"
    return None


def _hparams(facts: ModelFacts) -> Mapping[str, Any]:
    prefix = f"{facts.architecture}."
    kv = {k[len(prefix) :]: v for k, v in facts.kv.items() if k.startswith(prefix)}
    return {k: v for k, v in kv.items() if k not in _FREE}


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, list) and isinstance(b, list):  # one more value for the block
        return all(map(_equal, a, b)) if a and b else a == b
    if isinstance(a, float) or isinstance(b, float):
        return a is not None and b is not None and bool(np.isclose(a, b, rtol=1e-5, atol=0))
    return bool(a == b)


def _why_not_tokens(model: ModelFacts, side: ModelFacts) -> str | None:
    """Texts only: which tokens end an answer is the target's business, and files differ in it."""
    if side.n_vocab != model.n_vocab:
        return f"its vocabulary has {side.n_vocab} tokens, but the model's has {model.n_vocab}"
    key = "tokenizer.ggml.tokens"
    ours, theirs = (raw_metadata(facts.path).get(key) for facts in (model, side))
    return None if ours == theirs else "their vocabularies differ in their token texts"


def _why_not_weights(model: ModelFacts, side: ModelFacts) -> str | None:
    ours, theirs = ({t.name: t for t in facts.tensors} for facts in (model, side))
    for name in ("token_embd.weight", "output_norm.weight"):
        for facts, tensors in ((model, ours), (side, theirs)):
            if name not in tensors:
                return f"{facts.path} holds no {name}"
    norm, other = (_rows(t["output_norm.weight"]) for t in (ours, theirs))
    if not np.array_equal(norm, other):
        return "their output norms differ, so the block was trained for another model"
    head = f"blk.{side.n_layer}.nextn.shared_head_head.weight"
    if "output.weight" in ours and "output.weight" not in theirs and head not in theirs:
        return "it has no output.weight, and llama.cpp would draft with the embedding instead"
    for name in ("token_embd.weight", "output.weight"):
        if name in ours and name in theirs:
            alike = similarity(_rows(ours[name]), _rows(theirs[name]))
            if alike < SIMILAR:
                return (
                    f"the rows of {name} have a cosine similarity of {alike:.2f}, but rows of the "
                    f"same model would have more than {SIMILAR}"
                )
    return None


def _rows(tensor: TensorInfo) -> NDArray[np.float32]:
    """Up to `N_ROWS` rows spread over the tensor, float32 [rows, columns]."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    n_rows = int(np.prod(tensor.shape[1:], dtype=np.int64))
    row_bytes = tensor.n_bytes // n_rows
    rows = []
    try:
        with Path(tensor.file).open("rb") as file:
            for i in np.linspace(0, n_rows - 1, min(N_ROWS, n_rows)).astype(int):
                file.seek(tensor.offset + int(i) * row_bytes)
                rows.append(np.frombuffer(file.read(row_bytes), np.uint8))
        return dequantize(np.stack(rows), GGMLQuantizationType[tensor.type]).astype(np.float32)
    except OSError as error:
        raise LoadFailed(f"cannot read {tensor.file}: {error.strerror}") from error
    except (KeyError, NotImplementedError) as error:
        raise UnsupportedModel(
            f"{tensor.name} in {tensor.file} is {tensor.type}, which cannot be compared"
        ) from error


def similarity(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """The mean cosine of rows; two rows of zeros are alike (unused tokens have such)."""
    dots = (a * b).sum(1)
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    both_zero = ~a.any(1) & ~b.any(1)
    return float(np.where(lengths > 0, dots / np.maximum(lengths, 1e-30), both_zero).mean())


def _remarks(model: ModelFacts, side: ModelFacts) -> list[str]:
    ours, theirs = _hparams(model), _hparams(side)
    return [
        f"{side.path} has {key} {theirs[key]}, but {model.path} has none: the block follows the "
        "model"
        for key in sorted(theirs.keys() - ours.keys())
    ]
