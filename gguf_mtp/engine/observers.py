"""What a round did, told to whoever watches: metrics, a trace.

Observers are called on the engine's thread, once per round, so they must not block. Knows neither
what they do with it nor any file or network.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from gguf_mtp.engine.request import Outcome, RoundTimes, SequenceStep

log = logging.getLogger(__name__)

Fallback = Literal["drafter_failed", "never_accepted", "cache_full"]


class SequenceReport(NamedTuple):
    """One sequence's part in a round.

    `request` is its id. It was allowed to draft `depth` tokens; `reason` says in a word or two why
    so many ("off" when nothing drafts at all, "fixed" where nobody decides). Of `n_drafted` tokens
    by the drafter `source` the target looked at `n_judged` and agreed with `n_accepted`;
    `n_committed` joined the answer.
    """

    request: int
    depth: int
    reason: str
    source: str
    n_drafted: int
    n_judged: int
    n_accepted: int
    n_committed: int


class EngineLoad(NamedTuple):
    """`n_prefill` prompt rows were decoded; sequences hold `n_cells` positions of the target's KV
    cache, idle prefixes included; `n_waiting` requests have no slot."""

    n_prefill: int
    n_cells: int
    n_waiting: int


@dataclass(frozen=True, slots=True)
class RoundReport:
    """Everything about one round. Times in seconds: the target's decode, drafting, the rest."""

    parts: Sequence[SequenceReport]
    load: EngineLoad
    target_s: float
    draft_s: float
    other_s: float

    @property
    def seconds(self) -> float:
        return self.target_s + self.draft_s + self.other_s


class Observer(Protocol):
    """Is told of every round, and of every time the engine had to do with less than it wanted:
    `kind` for counting, `why` in one sentence."""

    def round(self, report: RoundReport) -> None: ...
    def fell_back(self, kind: Fallback, why: str) -> None: ...


class Observers:
    """Those who watch an engine; nothing is put together while there are none. One that raises is
    left out from then on: answers do not fail because nobody could count them."""

    def __init__(self) -> None:
        self._observers: list[Observer] = []

    def add(self, observer: Observer) -> None:
        self._observers.append(observer)

    def __bool__(self) -> bool:
        return bool(self._observers)

    def round(
        self,
        judged: Sequence[tuple[SequenceStep, Outcome]],
        load: EngineLoad,
        times: RoundTimes,
        seconds: float,
    ) -> None:
        """Tells of a round that took `seconds`."""
        report = RoundReport(
            parts=[_part(step, outcome) for step, outcome in judged],
            load=load,
            target_s=times.target_s,
            draft_s=times.draft_s,
            other_s=times.other_s(seconds),
        )
        self._tell(lambda observer: observer.round(report))

    def fell_back(self, kind: Fallback, why: str) -> None:
        self._tell(lambda observer: observer.fell_back(kind, why))

    def _tell(self, what: Callable[[Observer], None]) -> None:
        for observer in list(self._observers):
            try:
                what(observer)
            except Exception:
                log.exception("observer %s failed and was removed", type(observer).__name__)
                self._observers.remove(observer)


def _reason(step: SequenceStep) -> str:
    if step.n_prompt:
        return "first token"
    return (step.limit.reason or "fixed") if step.limit else "off"


def _part(step: SequenceStep, outcome: Outcome) -> SequenceReport:
    return SequenceReport(
        request=step.request.id,
        depth=step.limit.n if step.limit else 0,
        reason=_reason(step),
        source=step.draft.source,
        n_drafted=len(step.draft.tokens),
        n_judged=outcome.n_judged,
        n_accepted=outcome.n_accepted,
        n_committed=len(outcome.committed),
    )
