"""Which drafters a model gets: from headers and wishes, before anything is loaded.

"auto" takes the MTP block when there is one (a draft model instead, when one is named), and copying
beside it: by lookup any model can draft. What is named but cannot be is an error. Knows neither
llama.cpp nor how a drafter works.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from gguf_mtp.drafters.registry import parse_drafters
from gguf_mtp.errors import RequestError, UnsupportedModel
from gguf_mtp.gguf import cache_layout, model_facts, side_file, vocabularies
from gguf_mtp.types import ModelFacts

log = logging.getLogger(__name__)


class DrafterSelection(NamedTuple):
    """Drafters by name, the preferred one first, and the files they need beside the model's:
    `side` holds the MTP block where the model's own is not taken, `model` is the draft model."""

    names: tuple[str, ...] = ()
    side: ModelFacts | None = None
    model: ModelFacts | None = None

    @property
    def uses_own_block(self) -> bool:
        """Whether the model's own MTP block drafts."""
        return "mtp" in self.names and self.side is None


class DraftOptions(NamedTuple):
    """What the user asks for: `draft` as `drafters.names.wished` reads it, a file to draft with,
    and whether drafts shall all have one length."""

    draft: str
    file: Path | None
    is_fixed: bool


def select_drafters(facts: ModelFacts, wishes: DraftOptions) -> DrafterSelection:
    """The drafters for `facts`' model.

    Raises `RequestError` (wishes that contradict each other), `UnsupportedModel` (a drafter that
    was named cannot be; a file that belongs to another model; an MTP block that would make
    llama.cpp abort) and as `facts.read`.
    """
    names = parse_drafters(wishes.draft)
    if names == ():
        return DrafterSelection()
    why = cache_layout.why_no_draft(facts.kv, facts.architecture)
    if why is not None:
        if names is not None or wishes.file is not None:
            raise UnsupportedModel(f"drafting is not possible with {facts.path}: {why}")
        log.warning("drafting is off: %s", why)
        return DrafterSelection()
    if wishes.file is not None:
        if names is not None and not {"mtp", "model"} & set(names):
            raise RequestError(f"draft is {wishes.draft!r}, which does not use {wishes.file}")
        side, model = read_draft(facts, wishes.file, names)
    else:
        side, model = None, None
    if names is None:
        return _auto(facts, side, model, wishes.is_fixed)
    if "mtp" in names and side is None and not facts.can_draft:
        side = _beside(facts)
        if side is None:
            raise UnsupportedModel(f"{facts.path} cannot draft: {facts.reason}")
    if "model" in names and model is None:
        raise RequestError(
            f"draft is {wishes.draft!r}, but there is no draft model: name one with --draft-model"
        )
    for used, file in (("mtp", side), ("model", model)):
        if file is not None and used not in names:
            raise RequestError(f"draft is {wishes.draft!r}, which does not use {file.path}")
    return DrafterSelection(names, side, model)


def _auto(
    facts: ModelFacts, side: ModelFacts | None, model: ModelFacts | None, is_fixed: bool
) -> DrafterSelection:
    if model is not None:
        main = "model"
    else:
        side = side or (None if facts.can_draft else _beside(facts))
        main = "mtp" if side is not None or _has_block(facts) else ""
    if not main:
        log.warning("drafting by n-gram lookup only: %s", facts.reason)
        return DrafterSelection(("ngram",))
    # A fixed length leaves nobody to say when copying pays.
    return DrafterSelection((main,) if is_fixed else ("ngram", main), side, model)


def _has_block(facts: ModelFacts) -> bool:
    """Whether the model's own MTP block drafts. One that would make llama.cpp abort is refused: the
    file is not what its owner takes it for."""
    if not facts.can_draft and facts.n_mtp and facts.architecture in model_facts.ARCHITECTURES:
        raise UnsupportedModel(
            f"{facts.path} cannot draft: {facts.reason}; use --draft off or --draft ngram to run "
            "it without its MTP block"
        )
    return facts.can_draft


def _beside(facts: ModelFacts) -> ModelFacts | None:
    """The side file in the model's folder that belongs to it."""
    found, refusals = side_file.find(facts)
    for refusal in refusals:
        log.warning("%s", refusal)
    if found is not None:
        log.info("drafting with %s, found next to the model", found.path)
    return found


def read_draft(
    facts: ModelFacts, path: Path, names: tuple[str, ...] | None = None
) -> tuple[ModelFacts | None, ModelFacts | None]:
    """A file to draft with is one of two things, by its header: (an MTP block of this model, alone
    or in a whole file; a model of its own)."""
    found = model_facts.read_any(path)
    only_block = model_facts.is_side_file(found)
    if names is not None and ("mtp" in names) != ("model" in names):
        as_block = "mtp" in names
    else:
        as_block = only_block or (found.can_draft and _belongs(facts, found))
    if as_block:
        side = side_file.read(path)
        for remark in side_file.check(facts, side):
            log.info("%s", remark)
        return side, None
    if only_block:
        raise UnsupportedModel(f"{path} cannot be a draft model: it holds only an MTP block")
    if cache_layout.is_recurrent(found.architecture):
        raise UnsupportedModel(
            f"{path} cannot be a draft model: it has recurrent layers, and their cache cannot drop "
            "tokens that were drafted one at a time"
        )
    why = vocabularies.why_not_one(facts, found)
    if why is not None:
        raise UnsupportedModel(f"{path} cannot draft for {facts.path}: {why}")
    return None, found


def _belongs(facts: ModelFacts, found: ModelFacts) -> bool:
    try:
        side_file.check(facts, found)
    except UnsupportedModel:
        return False
    return True
