"""One sequence: its place in the KV caches, its request, and what a round made of it.

Cutting an answer at its end happens here, before anything is rolled back or counted, so that
tokens after the end reach neither cache nor statistics nor text. Knows no decoder and no drafter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gguf_mtp.depth.protocol import DraftResult, RoundFeedback, SkippedRounds
from gguf_mtp.errors import BadLogits
from gguf_mtp.params import PLAIN, RequestOptions, SamplingParams
from gguf_mtp.sampling.chain import SamplingChain
from gguf_mtp.sampling.logprobs import logprobs_of
from gguf_mtp.sampling.verify import verify
from gguf_mtp.stats import RoundCount, Stats
from gguf_mtp.types import Draft, DraftLimit, FinishReason, Floats, Rows, TokenLogprobs, Verdict

NO_DRAFT = Draft((), (), (), "")
NO_TOKEN = -1
"""Where the target's logits say nothing."""


class Request:
    """One answer in the making. `n_left`: tokens that may still be committed."""

    def __init__(
        self,
        id_: int,
        prompt: Sequence[int],
        params: SamplingParams,
        n_left: int,
        options: RequestOptions = PLAIN,
    ) -> None:
        self.id = id_
        self.prompt = list(prompt)
        made = options.chain or SamplingChain(params, prompt, options.constraint)
        self.chain: SamplingChain = made
        self.n_left = n_left
        self.options = options
        self.stats = Stats()

    def n_draft_max(self) -> int:
        """How many draft tokens could all be committed with the one after them, and are allowed."""
        room = self.n_left - 1
        most = self.options.draft_max
        return room if most is None else min(room, most)


class Slot:
    """A place for one sequence in the KV caches.

    `tokens` are certain, the last one not decoded by the target; they outlive the request that put
    them there, so that the next one with the same beginning finds it read. `last_use` grows with
    every use.
    """

    def __init__(self, seq: int) -> None:
        self.seq = seq
        self.tokens: list[int] = []
        self.last_use = 0
        self.request: Request | None = None

    def n_common(self, prompt: Sequence[int]) -> int:
        """How many tokens `prompt` begins with that the slot holds."""
        n = min(len(prompt), len(self.tokens))
        if self.tokens[:n] == prompt[:n]:
            return n
        return next(i for i in range(n) if self.tokens[i] != prompt[i])


class Outcome(NamedTuple):
    """A round's result for one sequence.

    `committed` tokens join the answer. The target looked at `n_judged` draft tokens and agreed with
    `n_accepted`; an end token that was drafted rightly counts in both, what lies behind it in
    neither. `logprobs` go with the committed tokens when the request asked for them. `error` says
    why the sequence "failed".
    """

    committed: list[int]
    n_judged: int
    n_accepted: int
    finish: FinishReason | None
    logprobs: list[TokenLogprobs] | None = None
    error: BadLogits | None = None


class SequenceStep:
    """One sequence's part of one round. Mostly its last token and a draft; where the prompt's end
    is read, the `n_prompt` tokens before the last one too, from position `first` on."""

    def __init__(self, slot: Slot, request: Request, first: int | None = None) -> None:
        self.slot, self.request = slot, request
        last = len(slot.tokens) - 1
        self.first = last if first is None else first
        self.n_prompt = last - self.first
        self.draft = NO_DRAFT
        self.free_draft = NO_DRAFT  # by a free drafter, sent to the target or not
        self.limit: DraftLimit | None = None  # of the draft; None where nothing drafts

    @property
    def seq(self) -> int:
        return self.slot.seq

    def rows(self) -> Rows:
        """What the target decodes; the last certain token and the draft come with logits."""
        tokens = [*self.slot.tokens[self.first :], *self.draft.tokens]
        return Rows(self.slot.seq, self.first, tokens, 1 + len(self.draft.tokens))

    def judge(self, logits: Floats, end_tokens: frozenset[int]) -> Outcome:
        """Verifies the draft against the target's `logits`, float32 [len(draft) + 1, n_vocab], and
        cuts the result where the answer ends. Logits that are no numbers end it at once."""
        chain = self.request.chain
        tokens = self.draft.tokens
        failure: BadLogits | None = None
        try:
            verdict = verify(self.draft, lambda k: chain.target_probs(logits[k], tokens[:k]), chain)
        except BadLogits as error:
            n_kept = error.position - len(self.slot.tokens)  # the rows before it were sound
            verdict, failure = Verdict(n_kept, NO_TOKEN), error
        options = self.request.options
        if options.stop_tokens:
            end_tokens |= options.stop_tokens
        outcome = cut(verdict, tokens, self.request.n_left, end_tokens)
        if failure and outcome.committed[-1:] == [NO_TOKEN]:
            committed = outcome.committed[:-1]
            outcome = outcome._replace(
                committed=committed, n_judged=n_kept, finish="failed", error=failure
            )
        if options.n_logprobs is None:
            return outcome
        pairs = zip(logits, outcome.committed, strict=False)  # rows behind a refusal say nothing
        likely = [logprobs_of(row, token, options.n_logprobs) for row, token in pairs]
        return outcome._replace(logprobs=likely)

    def count(self, outcome: Outcome, times: RoundTimes, seconds: float) -> None:
        """Adds the round, which took `seconds`, to the request's statistics."""
        committed, n_judged, n_accepted = outcome[:3]
        self.request.n_left -= len(committed)
        if self.n_prompt:
            self.request.stats.count_first(len(committed))
            return
        self.request.stats.count_round(
            RoundCount(
                len(committed),
                len(self.draft.tokens),
                n_judged,
                n_accepted,
                seconds,
                times.target_s,
                times.draft_s,
                self.draft.source,
            )
        )


def cut(verdict: Verdict, draft: Sequence[int], n_left: int, end_tokens: frozenset[int]) -> Outcome:
    """What is left of a verdict once the answer ends: at its first end token, or after `n_left`."""
    n_accepted = verdict.n_accepted
    n_judged = min(n_accepted + 1, len(draft))
    tokens = [*draft[:n_accepted], verdict.next_token]
    for i, token in enumerate(tokens):
        if token in end_tokens:
            if i < n_accepted:
                n_judged = n_accepted = i + 1
            return Outcome(tokens[:i], n_judged, n_accepted, "stop")
    return Outcome(tokens, n_judged, n_accepted, "length" if len(tokens) >= n_left else None)


class RoundTimes(NamedTuple):
    """When a round began (perf_counter), the seconds of its target decode, and of its drafting by
    drafter."""

    start: float
    target_s: float
    by_drafter: Mapping[str, float]

    @property
    def draft_s(self) -> float:
        return sum(self.by_drafter.values())

    def other_s(self, seconds: float) -> float:
        """What else went into a round that took `seconds`."""
        return seconds - self.target_s - self.draft_s


def feedback_of(
    judged: Sequence[tuple[SequenceStep, Outcome]],
    n_prefill: int,
    times: RoundTimes,
    seconds: float,
    skipped: SkippedRounds | None,
) -> RoundFeedback:
    """What the depth decision learns from a round that took `seconds`."""
    return RoundFeedback(
        judged=[
            DraftResult(t.seq, t.draft.confidence, o.n_accepted, o.n_judged, t.draft.source)
            for t, o in judged
        ],
        n_rows=sum(1 + len(t.draft.tokens) for t, _ in judged),
        n_prefill=n_prefill,
        n_cells=sum(len(t.slot.tokens) for t, _ in judged),
        target_s=times.target_s,
        draft_s=times.draft_s,
        other_s=times.other_s(seconds),
        free_drafts=[_compare(t, o.committed) for t, o in judged if t.free_draft.tokens],
        seconds_of=times.by_drafter,
        skipped=skipped,
    )


def _compare(step: SequenceStep, committed: Sequence[int]) -> DraftResult:
    """The step's free draft against what was committed: a point mass is accepted as often as the
    target draws it, so that this is the target's verdict whether it was asked or not."""
    free_draft = step.free_draft
    n = min(len(free_draft.tokens), len(committed))
    n_same = next((k for k in range(n) if free_draft.tokens[k] != committed[k]), n)
    return DraftResult(
        step.seq, free_draft.confidence, n_same, min(n_same + 1, n), free_draft.source
    )
