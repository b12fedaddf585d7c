"""The drafters there are, in the order in which automatic drafting prefers them.

To add one: write its module with a `DrafterSpec` (see `spec`), and list it here.
"""

from __future__ import annotations

from collections.abc import Sequence

from gguf_mtp.drafters import draft_model, dspark, mtp, ngram
from gguf_mtp.drafters.spec import DrafterSpec
from gguf_mtp.errors import RequestError
from gguf_mtp.types import ModelFacts

__all__ = ["DRAFTERS", "drafter_beside", "label_of", "parse_drafters"]

DRAFTERS: dict[str, DrafterSpec] = {
    spec.name: spec for spec in (ngram.SPEC, mtp.SPEC, dspark.SPEC, draft_model.SPEC)
}


def label_of(name: str) -> str:
    """What a drafter is called for people; its name if it is not registered."""
    return DRAFTERS[name].label if name in DRAFTERS else name


def drafter_beside(target: ModelFacts) -> tuple[str, ModelFacts | None]:
    """The drafter that has a file next to the target, and that file's facts; or ("", None)."""
    for name, spec in DRAFTERS.items():
        found = spec.find(target)
        if found is not None:
            return name, found
    return "", None


def parse_drafters(text: str | Sequence[str]) -> tuple[str, ...] | None:
    """The drafters that `text` names, in its order: "off" none, "auto" whichever there are (None),
    "ngram,mtp" these. A list holds one name each.

    Raises `RequestError` for other words.
    """
    words = [word.strip() for word in text.split(",")] if isinstance(text, str) else list(text)
    if words == ["auto"]:
        return None
    if words == ["off"]:
        return ()
    for word in words:
        if word in ("auto", "off"):
            raise RequestError(f"draft is {text!r}, but {word!r} cannot be combined with others")
        if word not in DRAFTERS:
            known = ", ".join(DRAFTERS)
            raise RequestError(f"draft is {text!r}, but {word!r} is not one of auto, off, {known}")
        if words.count(word) > 1:
            raise RequestError(f"draft is {text!r}, which names {word!r} twice")
    return tuple(words)
