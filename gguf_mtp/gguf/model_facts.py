"""GGUF header -> `ModelFacts`; refuses, in words, what llama.cpp would abort the process on.

Knows llama.cpp's names for hyperparameters. What its loader asserts for every architecture is in
`load_rules`, what one asserts on top (and what its MTP graph asserts) in `arch`. How a header lies
in a file is `header`'s.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gguf_mtp.errors import LoadFailed, UnsupportedModel
from gguf_mtp.gguf import cache_layout
from gguf_mtp.gguf.arch import deepseek2, deepseek4, deepseek32, dflash, nextn, recurrent
from gguf_mtp.gguf.header import Header, read_header
from gguf_mtp.gguf.hparams import Hparams
from gguf_mtp.gguf.load_rules import why_not_load
from gguf_mtp.types import ModelFacts, TensorInfo

__all__ = ["facts", "facts_of_any", "is_side_file", "read", "read_any", "summary"]

# architecture -> (what would abort a plain run, what keeps its MTP block from drafting)
Check = Callable[[Header, Hparams], "str | None"]
ARCHITECTURES: Mapping[str, tuple[Check, Check]] = {
    "deepseek2": (deepseek2.why_not_run, deepseek2.why_not_draft),
    "deepseek32": (deepseek32.why_not_run, deepseek32.why_not_draft),
    "deepseek4": (deepseek4.why_not_run, deepseek4.why_not_draft),
    dflash.ARCHITECTURE: (dflash.why_not_run, dflash.why_not_draft),
    **dict.fromkeys(nextn.GRAPHS, (nextn.why_not_run, nextn.why_not_draft)),
    **dict.fromkeys(cache_layout.WITH_BLOCK, (recurrent.why_not_run, nextn.why_not_draft)),
}
DRAFT_HEADS = {"eagle3": "an EAGLE-3 head", "dflash": "a DFlash head"}
"""Architectures that draft from another model's layers: alone they run from an input that nothing
fills, and answer with noise."""
FOREIGN = {
    "deepseek4_mtp_support": "an MTP block of the ds4 engine",
    "deepseek4-dspark": "a DSpark drafter of the ds4 engine",
}
"""Formats of another engine; `convert` makes a file from the checkpoint."""
FIRST_TENSOR = "blk.0.attn_norm.weight"

# Which part of the model a tensor belongs to, by its name inside its layer; first match wins.
GROUPS: Sequence[tuple[str, str]] = (
    ("token_embd", "embedding"),
    ("output", "output"),
    (r".*_exps\.", "experts"),
    (r".*_shexp\.", "shared experts"),
    (r"(ffn_gate_inp|exp_probs_b)", "router"),
    (r".*norm", "norms"),
    ("attn_", "attention"),
    ("ffn_", "dense ffn"),
)


def read(path: str | os.PathLike[str]) -> ModelFacts:
    """The facts of a GGUF file (of its first shard's name, when it is split).

    Raises `LoadFailed` when the file is missing, not a GGUF, damaged or cut short, and
    `UnsupportedModel` when it is sound but llama.cpp would abort the process on it.
    """
    return facts(read_header(path), os.fspath(path))


def read_any(path: str | os.PathLike[str]) -> ModelFacts:
    """As `read`, but also of a side file: a drafter without its model."""
    return facts_of_any(read_header(path), os.fspath(path))


def facts_of_any(header: Header, path: str) -> ModelFacts:
    """As `read_any`, of a header read before."""
    found = _facts(header, path)
    if is_side_file(found) and found.can_draft:
        what, use = _drafter(found)
        return replace(found, reason=f"{what} without its model: {use}")
    return found


def is_side_file(facts: ModelFacts) -> bool:
    """Whether the file holds a drafter without the model around it: an MTP block (llama.cpp asks
    the same), or DSpark's stages."""
    if facts.architecture == dflash.ARCHITECTURE:
        return True
    return facts.n_mtp > 0 and all(t.name != FIRST_TENSOR for t in facts.tensors)


def _drafter(facts: ModelFacts) -> tuple[str, str]:
    """What a side file holds, and what it is for."""
    if facts.architecture != dflash.ARCHITECTURE:
        return "an MTP block", "use it as --draft-model, or graft it"
    size = facts.kv[f"{dflash.ARCHITECTURE}.block_size"]
    return f"DSpark, which drafts blocks of {size} tokens,", "use it as --draft-model"


def facts(header: Header, path: str) -> ModelFacts:
    """As `read`, of a header read before."""
    found = _facts(header, path)
    if is_side_file(found):
        raise UnsupportedModel(
            f"{path} cannot be run: it holds {_drafter(found)[0]} without the rest of the model; "
            "load the model and pass this file as --draft-model"
        )
    return found


def _facts(header: Header, path: str) -> ModelFacts:
    arch = header.kv.get("general.architecture")
    if not isinstance(arch, str) or not arch:
        raise LoadFailed(f"{path} does not name its architecture (general.architecture)")
    if arch in DRAFT_HEADS and not dflash.is_dspark(header.kv):
        raise UnsupportedModel(
            f"{path} is {DRAFT_HEADS[arch]} ({arch}): it drafts from the layers of another model, "
            "which gguf-mtp does not support yet"
        )
    if arch in FOREIGN:
        raise UnsupportedModel(f"{path} is {FOREIGN[arch]} ({arch}), which llama.cpp does not run")
    kind = header.kv.get("general.type", "model")
    if kind != "model" or arch == "clip":
        raise UnsupportedModel(f"{path} is not a language model ({arch}, general.type {kind!r})")
    if not header.tensors:
        raise UnsupportedModel(f"{path} holds no tensors, so it is a vocabulary without a model")
    hparams = Hparams(header.kv, arch, path)
    n_blocks, n_mtp = hparams.count("block_count"), hparams.count("nextn_predict_layers", 0)
    problem = why_not_load(header, hparams)
    why_not_run, why_not_draft = ARCHITECTURES.get(arch, (None, None))
    if problem is None and why_not_run is not None:
        problem = why_not_run(header, hparams)
    if problem is not None:
        raise UnsupportedModel(f"{path} cannot be run: {problem}")
    if n_mtp == 0 and arch != dflash.ARCHITECTURE:
        obstacle: str | None = "the file has no MTP block"
    elif why_not_draft is None:
        why = nextn.why_not_known(hparams)
        obstacle = f"drafting with the MTP block of a {arch} model is not supported: {why}"
    else:
        obstacle = why_not_draft(header, hparams)
    return ModelFacts(
        path=path,
        architecture=arch,
        name=str(header.kv.get("general.name", "")),
        n_layer=n_blocks - n_mtp,  # block_count counts the MTP blocks too
        n_mtp=n_mtp,
        n_embd=hparams.count("embedding_length"),
        n_vocab=hparams.n_vocab,
        context_length=hparams.count("context_length"),
        n_expert=hparams.count("expert_count", 0),
        n_expert_used=hparams.largest("expert_used_count", 0),
        can_draft=obstacle is None,
        reason=obstacle or _why_draft(hparams, n_blocks - n_mtp),
        tensors=header.tensors,
        kv=header.kv,
    )


def _why_draft(hparams: Hparams, n_layer: int) -> str:
    found = f"blk.{n_layer} is an MTP block that llama.cpp can run"
    if not cache_layout.is_recurrent(hparams.arch) or hparams.arch == "deepseek4":
        return found
    n_states = cache_layout.kept(hparams.kv, hparams.arch, n_layer).count("state")
    size = n_states * cache_layout.state_bytes(hparams.kv, hparams.arch) / (1 << 20)
    return (
        f"{found}; {n_states} of {n_layer} layers are recurrent, so each sequence keeps a state of "
        f"{size:,.2f} MiB, plus one more for each token of --draft-max"
    )


def summary(facts: ModelFacts) -> dict[str, Any]:
    """The facts as plain JSON values.

    `tensors` holds bytes by part of the model and by type, `{"experts": {"Q8_0": 123}, ...}`;
    everything in an MTP block is the part "mtp". `vocab` is a number of tokens.
    """
    groups: dict[str, dict[str, int]] = {}
    for tensor in facts.tensors:
        types = groups.setdefault(_group(tensor, facts.n_layer), {})
        types[tensor.type] = types.get(tensor.type, 0) + tensor.n_bytes
    files = {facts.path} | {tensor.file for tensor in facts.tensors}
    return {
        "path": facts.path,
        "name": facts.name,
        "file_bytes": sum(Path(file).stat().st_size for file in files),
        "architecture": facts.architecture,
        "n_layer": facts.n_layer,
        "n_mtp": facts.n_mtp,
        "can_draft": facts.can_draft,
        "reason": facts.reason,
        "context_length": facts.context_length,
        "vocab": facts.n_vocab,
        "tensors": groups,
    }


def _group(tensor: TensorInfo, n_layer: int) -> str:
    match = re.fullmatch(r"blk\.(\d+)\.(.+)", tensor.name)
    if match and int(match[1]) >= n_layer:
        return "mtp"
    name = match[2] if match else tensor.name
    if name.startswith("output_norm"):
        return "norms"
    return next((group for pattern, group in GROUPS if re.match(pattern, name)), "other")
