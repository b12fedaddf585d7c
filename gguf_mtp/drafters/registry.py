"""What drafters are called, and how a wish for some of them is written."""

from __future__ import annotations

from gguf_mtp.errors import RequestError

NAMES = ("ngram", "mtp", "model")


def parse_drafters(text: str) -> tuple[str, ...] | None:
    """The drafters that `text` names, in its order: "off" none, "auto" whichever there are (None),
    "ngram,mtp" these.

    Raises `RequestError` for other words.
    """
    words = [word.strip() for word in text.split(",")]
    if words == ["auto"]:
        return None
    if words == ["off"]:
        return ()
    for word in words:
        if word in ("auto", "off"):
            raise RequestError(f"draft is {text!r}, but {word!r} cannot be combined with others")
        if word not in NAMES:
            known = ", ".join(NAMES)
            raise RequestError(f"draft is {text!r}, but {word!r} is not one of auto, off, {known}")
        if words.count(word) > 1:
            raise RequestError(f"draft is {text!r}, which names {word!r} twice")
    return tuple(words)
