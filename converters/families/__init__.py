"""Which family converts what config.json names in `architectures`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

from ...errors import ConversionError
from .. import hyper, mla
from ..tensors import Adapted, Books, Source
from . import deepseek_v2, deepseek_v3, deepseek_v32, glm4_moe_lite


class Adapt(Protocol):
    """Says which GGUF tensors and metadata a checkpoint makes."""

    def __call__(
        self, checkpoint: Source, choices: mla.Choices, *, books: Books | None = None
    ) -> Adapted: ...


FAMILIES: Mapping[str, Adapt] = {
    "DeepseekV3ForCausalLM": partial(mla.adapt, family=deepseek_v3.FAMILY),  # V3, R1, V3.1, Kimi-K2
    "DeepseekV32ForCausalLM": partial(mla.adapt, family=deepseek_v32.FAMILY),
    "Glm4MoeLiteForCausalLM": partial(mla.adapt, family=glm4_moe_lite.FAMILY),
    "DeepseekV2ForCausalLM": partial(mla.adapt, family=deepseek_v2.FAMILY),
    "DeepseekV4ForCausalLM": hyper.adapt,
}
"""A family with DeepSeek's attention says what it does otherwise (`Family`); another one has an
`adapt` of its own."""


REFUSED: Mapping[str, str] = {
    "DeepseekV41ForCausalLM": "DeepSeek-V4.1 has other FP8 blocks and layers than V4, which the "
    "pinned llama.cpp does not run",
}
"""Families that look like one of these and are not."""


def needs(config: Mapping[str, Any], mtp: mla.Mtp, name: str) -> bool:
    """Whether a conversion reads the tensor `name` at all."""
    if config.get("architectures") == ["DeepseekV4ForCausalLM"]:
        return hyper.needs(config, mtp, name)
    return mla.needs(config, mtp, name)


def adapt(checkpoint: Source, choices: mla.Choices, books: Books | None = None) -> Adapted:
    """As `mla.adapt`, for the checkpoint's own family; raises `ConversionError` for others."""
    names = checkpoint.config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    adapt_ = FAMILIES.get(name) if isinstance(name, str) else None
    if not names:
        raise ConversionError("the configuration names no architectures, so it is no checkpoint's")
    if isinstance(name, str) and name in REFUSED:
        raise ConversionError(
            f"config.json: architecture {name!r} is not supported: {REFUSED[name]}"
        )
    if adapt_ is None:
        raise ConversionError(
            f"config.json: architecture {name!r} is not supported "
            f"(supported: {', '.join(FAMILIES)}). llama.cpp's convert_hf_to_gguf.py "
            "may convert it to a file that gguf-mtp can run"
        )
    try:
        return adapt_(checkpoint, choices, books=books)
    except OSError as error:
        raise ConversionError(f"cannot read {error.filename}: {error.strerror}") from None
