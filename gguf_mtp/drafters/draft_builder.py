"""One draft while it grows: what every drafter with a distribution of its own does alike."""

from __future__ import annotations

from gguf_mtp.types import Ask, Distribution, Draft, Floats


class DraftBuilder:
    """The draft that answers `ask`, one token after the other."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.tokens: list[int] = []
        self._probs: list[Distribution | None] = []
        self._confidence: list[float] = []
        self._stopped = False

    @property
    def wants_more(self) -> bool:
        return not self._stopped and len(self.tokens) < self.ask.limit.n

    def take(self, logits: Floats, sure: float | None = None) -> None:
        """Adds the next token, unless the drafter is not confident enough to go on. `logits`:
        float32 [n_vocab], the drafter's; `sure` its own confidence, where it has one."""
        chain, k = self.ask.chain, len(self.tokens)
        dist, largest = chain.draft_probs(logits, self.tokens)
        sure = largest if sure is None or largest == 0 else sure
        p_min = self.ask.limit.p_min
        if sure == 0 or (k < len(p_min) and sure < p_min[k]):  # 0: its logits are no numbers
            self._stopped = True
            return
        self.tokens.append(chain.draw(dist, self.tokens))
        self._probs.append(None if len(dist.ids) == 1 else dist)
        self._confidence.append(sure)

    def draft(self, source: str) -> Draft:
        return Draft(self.tokens, self._probs, self._confidence, source)
