"""What the files beside a checkpoint's weights must look like, before anything of them is believed.

Only what a conversion reads is described; everything else may be anything.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, StrictBool, StrictInt, StrictStr
from pydantic import ValidationError as PydanticError

from ..errors import ConversionError

__all__ = ["GenerationConfig", "TokenizerConfig", "TokenizerJson", "check"]

TokenId = Annotated[StrictInt, Field(ge=0, lt=1 << 31)]
_ANY = ConfigDict(extra="allow")


class _Step(BaseModel):
    model_config = _ANY
    type: StrictStr
    pattern: dict[str, Any] | None = None


class _Steps(BaseModel):
    model_config = _ANY
    type: StrictStr
    pretokenizers: list[_Step] | None = None
    pattern: dict[str, Any] | None = None


class _Model(BaseModel):
    model_config = _ANY
    type: StrictStr | None = None
    vocab: dict[str, TokenId] = Field(default_factory=dict)
    merges: list[StrictStr | tuple[StrictStr, StrictStr]] = Field(default_factory=list)


class _Added(BaseModel):
    model_config = _ANY
    id: TokenId
    content: StrictStr
    special: StrictBool = False


class TokenizerJson(BaseModel):
    """tokenizer.json, as the tokenizers library writes it."""

    model_config = _ANY
    model: _Model
    pre_tokenizer: _Steps | None = None
    added_tokens: list[_Added] | None = None


class _Text(BaseModel):
    model_config = _ANY
    content: StrictStr


class _Template(BaseModel):
    name: StrictStr
    template: StrictStr


class TokenizerConfig(BaseModel):
    """tokenizer_config.json, as transformers writes it."""

    model_config = _ANY
    bos_token: StrictStr | _Text | None = None
    eos_token: StrictStr | _Text | None = None
    pad_token: StrictStr | _Text | None = None
    add_bos_token: StrictBool | None = None
    add_eos_token: StrictBool | None = None
    chat_template: StrictStr | list[_Template] | None = None


class GenerationConfig(BaseModel):
    """generation_config.json; the ids in it are checked against the vocabulary elsewhere."""

    model_config = _ANY
    temperature: FiniteFloat | None = None
    top_p: FiniteFloat | None = None
    top_k: StrictInt | None = None
    min_p: FiniteFloat | None = None


def check(file: str, kind: type[BaseModel], value: dict[str, Any]) -> dict[str, Any]:
    """`value` as it is. Raises `ConversionError` with the place in `file` that is not so."""
    try:
        kind.model_validate(value)
    except PydanticError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        what = first["msg"][0].lower() + first["msg"][1:]
        if first["type"] == "missing":
            raise ConversionError(f"{file} has no {place}") from None
        raise ConversionError(f"{file}: {place} is {first['input']!r:.60}, but {what}") from None
    return value
