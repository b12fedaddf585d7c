"""What the rest of the program knows of a drafter: one object, kept in `registry`.

A drafter is a class that fulfils `types.Drafter` and a `DrafterSpec` beside it. The spec says how
the drafter is called, when it can draft, which file it may bring along, and how it is built from
contexts that are handed to it. So a drafter imports no llama.cpp, and nothing else knows its name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from gguf_mtp.types import Decoder, Drafter, ModelFacts

FLUSH = 256
"""Rows a drafter buffers for a sequence before it decodes them though no draft was asked for; its
context takes twice as many in one decode."""

__all__ = ["FLUSH", "DraftContext", "DraftParts", "DrafterSpec", "always", "no_file"]


class DraftContext(NamedTuple):
    """A context that a drafter decodes with; one decode takes at most `n_batch` rows. `file` is
    the one it brought along, if any."""

    decoder: Decoder
    n_batch: int
    file: ModelFacts | None = None


class DraftParts(Protocol):
    """What a drafter is built from, for `n_seq` sequences; a context is made when it is called for.

    `block` runs the MTP block or the stages of a spec with `needs_block`, `model` the draft model
    of one with `needs_model`. Both raise `LoadFailed`.
    """

    @property
    def n_seq(self) -> int: ...
    def block(self) -> DraftContext: ...
    def model(self) -> DraftContext: ...


def no_file(_target: ModelFacts) -> ModelFacts | None:
    """Nothing next to the target is this drafter's."""
    return None


def always(_target: ModelFacts, _file: ModelFacts | None) -> str | None:
    """Can draft for any target."""
    return None


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """One drafter.

    `name` stands in `--draft`, requests, metrics and traces; `label` is for people. `is_free` as in
    `types.Drafter`. `build` makes the drafter.

    `why_not(target, file)` is a sentence when it cannot draft for the target, with `file` being
    what it brought along, if anything; `refuses` raises `UnsupportedModel` instead of letting
    another drafter take its place. `find(target)` looks for a file next to the target. A file that
    the user names goes to the spec whose `claims(target, found)` is true, or to the one that reads
    files but claims none. `read(target, path)` raises `UnsupportedModel` for a file that does not
    fit the target.

    `needs_block`: it runs an MTP block of the target or of its file, or its file's stages, from the
    target's hidden rows. One drafter of a run does.
    `needs_model`: its file is a model with a KV cache of its own.
    """

    name: str
    label: str
    build: Callable[[DraftParts], Drafter]
    is_free: bool = False
    needs_block: bool = False
    needs_model: bool = False
    why_not: Callable[[ModelFacts, ModelFacts | None], str | None] = always
    refuses: Callable[[ModelFacts], None] | None = None
    find: Callable[[ModelFacts], ModelFacts | None] = no_file
    claims: Callable[[ModelFacts, ModelFacts], bool] | None = None
    read: Callable[[ModelFacts, Path], ModelFacts] | None = None
