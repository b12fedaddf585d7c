"""Which drafters a model gets: from headers and options, before anything is loaded.

"auto" takes the free drafters and one that takes time, the first in the registry that can draft. A
drafter that the user names but that cannot draft is an error. Knows neither llama.cpp nor any
drafter by name.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from gguf_mtp.drafters.registry import DRAFTERS, parse_drafters
from gguf_mtp.drafters.spec import DrafterSpec
from gguf_mtp.errors import RequestError, UnsupportedModel
from gguf_mtp.gguf import cache_layout, model_facts
from gguf_mtp.gguf.arch import dflash
from gguf_mtp.gguf.arch.dflash import BlockShape
from gguf_mtp.types import ModelFacts

__all__ = ["DraftOptions", "DrafterSelection", "assign_file", "select_drafters"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DrafterSelection:
    """Drafters by name, the preferred one first, and by name the file that one brings along."""

    names: tuple[str, ...] = ()
    files: Mapping[str, ModelFacts] = field(default_factory=dict)

    @property
    def specs(self) -> list[DrafterSpec]:
        return [DRAFTERS[name] for name in self.names]

    @property
    def has_block(self) -> bool:
        """Whether an MTP block drafts, the model's own or another file's, or stages do."""
        return any(spec.needs_block for spec in self.specs)

    @property
    def uses_own_block(self) -> bool:
        return self.has_block and self.side is None

    @property
    def side(self) -> ModelFacts | None:
        """The file that holds the MTP block where the model's own is not taken, or the stages."""
        return next((self.files.get(s.name) for s in self.specs if s.needs_block), None)

    @property
    def block(self) -> BlockShape | None:
        """How the side file drafts, if whole blocks."""
        return dflash.shape(self.side)

    @property
    def block_drafter(self) -> str:
        """The name of the one that has an MTP block or stages, if any."""
        return next((spec.name for spec in self.specs if spec.needs_block), "")

    @property
    def model(self) -> ModelFacts | None:
        """The draft model."""
        return next((self.files.get(s.name) for s in self.specs if s.needs_model), None)


class DraftOptions(NamedTuple):
    """What the user asks for: `draft` as `drafters.registry.parse_drafters` reads it, a file to
    draft with, and whether all drafts shall have one length."""

    draft: str | Sequence[str]
    file: Path | None
    is_fixed: bool


def select_drafters(facts: ModelFacts, options: DraftOptions) -> DrafterSelection:
    """The drafters for `facts`' model.

    Raises `RequestError` (options that contradict each other), `UnsupportedModel` (a drafter that
    was named cannot draft; a file that belongs to another model; an MTP block that would make
    llama.cpp abort) and as `gguf.model_facts.read`.
    """
    names = parse_drafters(options.draft)
    if names == ():
        return DrafterSelection()
    why = cache_layout.why_no_draft(facts.kv, facts.architecture)
    if why is not None:
        if names is not None or options.file is not None:
            raise UnsupportedModel(f"drafting is not possible with {facts.path}: {why}")
        log.warning("drafting is off: %s", why)
        return DrafterSelection()
    files = {}
    if options.file is not None:
        if names is not None and not any(DRAFTERS[name].read for name in names):
            raise _unused(options, options.file)
        owner, found = assign_file(facts, options.file, names)
        files[owner.name] = found
    if names is None:
        return _auto(facts, files, options.is_fixed)
    blocks = [name for name in names if DRAFTERS[name].needs_block]
    if len(blocks) > 1:
        raise RequestError(
            f"draft is {options.draft!r}, but {blocks[0]} and {blocks[1]} read different rows of "
            "the model; name one of them"
        )
    for name in names:
        why = _why_not(facts, DRAFTERS[name], files)
        if why is not None and DRAFTERS[name].needs_model:
            raise RequestError(f"draft is {options.draft!r}, but {why}")
        if why is not None:
            raise UnsupportedModel(f"{facts.path} cannot draft: {why}")
    for name, file in files.items():
        if name not in names:
            raise _unused(options, file.path)
    return DrafterSelection(names, files)


def _unused(options: DraftOptions, file: str | Path) -> RequestError:
    return RequestError(f"draft is {options.draft!r}, which does not use {file}")


def _why_not(facts: ModelFacts, spec: DrafterSpec, files: dict[str, ModelFacts]) -> str | None:
    """Why the drafter cannot draft; `files` gains one that is found next to the model."""
    why = spec.why_not(facts, files.get(spec.name))
    if why is not None and (found := spec.find(facts)) is not None:
        files[spec.name] = found
        return None
    return why


def _auto(facts: ModelFacts, files: dict[str, ModelFacts], is_fixed: bool) -> DrafterSelection:
    free = [s.name for s in DRAFTERS.values() if s.is_free and s.why_not(facts, None) is None]
    # A drafter whose file the user named comes before those that need none.
    timed = sorted(
        (spec for spec in DRAFTERS.values() if not spec.is_free), key=lambda s: s.name not in files
    )
    for spec in timed:
        if _why_not(facts, spec, files) is None:
            # A fixed length leaves nothing to decide when a free draft is used.
            names = (spec.name,) if is_fixed else (*free, spec.name)
            return DrafterSelection(names, files)
        if spec.refuses:
            spec.refuses(facts)
    log.warning("drafting by n-gram lookup only: %s", facts.reason)
    return DrafterSelection(tuple(free))


def assign_file(
    facts: ModelFacts, path: Path, names: Sequence[str] | None = None
) -> tuple[DrafterSpec, ModelFacts]:
    """The drafter that a file is for, and the file's facts. Of drafters in `names` alone, where
    these are given.

    Raises `UnsupportedModel` for a file that does not fit the model.
    """
    readers = [s for s in DRAFTERS.values() if s.read and (names is None or s.name in names)]
    owner = readers[0]
    if len(readers) > 1:
        found = model_facts.read_any(path)
        readers.sort(key=lambda spec: spec.claims is None)
        owner = next(s for s in readers if s.claims is None or s.claims(facts, found))
    assert owner.read
    return owner, owner.read(facts, path)
