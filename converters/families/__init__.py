"""Which family converts what config.json names in `architectures`."""

from __future__ import annotations

from collections.abc import Mapping

from ...errors import ConversionError
from .. import mla
from ..family import Family
from ..tensors import Adapted, Books, Source
from . import deepseek_v2, deepseek_v3, deepseek_v32, glm4_moe_lite

FAMILIES: Mapping[str, Family] = {
    "DeepseekV3ForCausalLM": deepseek_v3.FAMILY,  # V3, R1, V3.1, Kimi-K2
    "DeepseekV32ForCausalLM": deepseek_v32.FAMILY,
    "Glm4MoeLiteForCausalLM": glm4_moe_lite.FAMILY,
    "DeepseekV2ForCausalLM": deepseek_v2.FAMILY,
}


def adapt(checkpoint: Source, choices: mla.Choices, books: Books | None = None) -> Adapted:
    """As `mla.adapt`, for the checkpoint's own family; raises `ConversionError` for others."""
    names = checkpoint.config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise ConversionError(
            f"config.json: architecture {name!r} is not supported "
            f"(supported: {', '.join(FAMILIES)}). llama.cpp's convert_hf_to_gguf.py "
            "may convert it to a file that gguf-mtp can run"
        )
    try:
        return mla.adapt(checkpoint, choices, family, books)
    except OSError as error:
        raise ConversionError(f"cannot read {error.filename}: {error.strerror}") from None
