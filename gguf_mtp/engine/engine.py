"""The loop: admit sequences, read their prompts, and go round after round until they end.

A round drafts for every sequence (maybe nothing), decodes all drafts with the target in one batch,
keeps what the target agrees with, and emits it. Plain decoding is a round with empty drafts; one
sequence is a batch of one; the first round of an answer reads the end of its prompt. Tokens in,
tokens out: the engine knows no text, and neither llama.cpp nor any drafter by name. Between two
steps, for every sequence whose prompt is read, `target.n_past(seq) == len(tokens) - 1`, and the
drafters have observed exactly those rows; behind an answer that ended by itself the last token is
read too.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence

from gguf_mtp.depth.protocol import Depth
from gguf_mtp.engine.config import EngineLimits
from gguf_mtp.engine.drafting import Drafting
from gguf_mtp.engine.observers import EngineLoad, Observers
from gguf_mtp.engine.prefill_chunk import PrefillChunker
from gguf_mtp.engine.request import Outcome, Request, RoundTimes, SequenceStep, Slot
from gguf_mtp.engine.slots import Slots
from gguf_mtp.engine.state_file import pack, unpack
from gguf_mtp.errors import NO_CELLS, ContextFull, DecodeError
from gguf_mtp.params import PLAIN, AnswerOptions, SamplingParams
from gguf_mtp.stats import Stats
from gguf_mtp.types import Chunk, Decoder, Drafter, FinishReason, Output, Rows, Step

log = logging.getLogger(__name__)

CACHE_FULL = "the KV cache was full: idle prefixes were dropped"


class Engine:
    """Serves up to `limits.n_seq` sequences at once. Not thread-safe: one thread owns it.

    `submit` queues a request, `step` runs one round for all, `cancel` ends one early; `generate` is
    the three for callers with a fixed list of prompts.
    """

    def __init__(
        self, target: Decoder, drafters: Sequence[Drafter], depth: Depth, limits: EngineLimits
    ) -> None:
        self.limits = limits
        self.depth = depth
        self.totals = Stats()  # of all requests that have ended
        self.observers = Observers()
        self.drafting = Drafting(drafters, self.observers)
        self._fingerprint = (
            f"{limits.fingerprint}, drafters {','.join(self.drafting.names) or 'none'}"
        )
        self._target = target
        self._slots = Slots(target, self.drafting, limits.n_seq, limits.n_idle)
        self._chunker = PrefillChunker(limits.n_batch)
        self._queue: deque[Request] = deque()
        self._n_submitted = 0
        self._inboxes: dict[int, deque[Chunk]] = {}  # by request, of those that `generate` reads
        self._unclaimed: list[Chunk] = []  # of `submit`'s requests, for the next `step`
        self._uncounted_s = 0.0  # of the last round, after its time was taken

    @property
    def is_drafting(self) -> bool:
        """Whether drafts are made, or would be where they pay."""
        return bool(self.drafting.names) and self.depth.n_max > 0

    @property
    def stopped_drafting(self) -> str | None:
        """Why, once it had to."""
        return self.drafting.stopped

    @property
    def is_idle(self) -> bool:
        return not self._queue and not self._slots.active()

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        max_tokens: int,
        options: AnswerOptions = PLAIN,
    ) -> int:
        """Queues a request and returns its id, which its chunks carry as `seq`.

        Raises as `EngineLimits.check` does.
        """
        self.limits.check(prompt, max_tokens)
        self._n_submitted += 1
        n_left = min(max_tokens, self.limits.n_ctx - len(prompt))
        self._queue.append(Request(self._n_submitted, prompt, params, n_left, options))
        return self._n_submitted

    def cancel(self, id_: int) -> Chunk | None:
        """Ends a request early and returns its last chunk; None when it has ended already."""
        for slot, request in self._slots.active():
            if request.id == id_:
                return self._finish(slot, Chunk(id_, [], 0), "cancelled")
        for request in self._queue:
            if request.id == id_:
                self._queue.remove(request)
                return Chunk(id_, [], 0, "cancelled", request.stats)
        return None

    def save(self, tokens: Sequence[int]) -> bytes:
        """What is read of the beginning of `tokens`, as bytes for `restore`. Nothing may be running
        on it. Raises `SavedStateError` when no cache holds any of it."""
        held, parts = self._slots.save(tokens)
        return pack(self._fingerprint, held, parts)

    def restore(self, data: bytes) -> list[int]:
        """Takes a saved sequence up again; returns its tokens, which a prompt may now begin with.

        Raises `SavedStateError` for damaged bytes, another model or other settings; nothing changes
        then.
        """
        saved = unpack(data, self._fingerprint)
        if len(saved.tokens) > self.limits.n_ctx:
            raise ContextFull(len(saved.tokens), self.limits.n_ctx)
        self._slots.load(saved.tokens, saved.parts)
        return saved.tokens

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        max_tokens: int,
        options: AnswerOptions = PLAIN,
    ) -> Iterator[Chunk]:
        """Answers to `prompts`; a chunk's `seq` is the prompt's index. Closing the iterator
        cancels. `options` with a constraint are for one prompt.

        Several iterators may be read in turn: a round that one of them runs moves all sequences,
        and each request's chunks wait in an inbox of its own. Raises the error that a request
        failed with.
        """
        inbox: deque[Chunk] = deque()
        indices = {self.submit(p, params, max_tokens, options): i for i, p in enumerate(prompts)}
        self._inboxes |= dict.fromkeys(indices, inbox)
        try:
            while indices:
                while not inbox:
                    self._unclaimed += self._distribute(self._round())
                chunk = inbox.popleft()
                index = indices[chunk.seq]
                if chunk.finish_reason:
                    del indices[chunk.seq], self._inboxes[chunk.seq]
                if chunk.error is not None:
                    raise chunk.error
                yield chunk._replace(seq=index)
        finally:
            for id_ in indices:
                del self._inboxes[id_]
                self.cancel(id_)

    def step(self) -> list[Chunk]:
        """One round for every active sequence; a chunk for each, empty while its prompt is read.

        Chunks of requests that `generate` submitted go to its iterators. Raises `DecodeError` from
        the target: then no sequence has moved.
        """
        chunks = self._distribute(self._round())
        earlier, self._unclaimed = self._unclaimed, []
        return earlier + chunks

    def _distribute(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Puts chunks into the inboxes of their iterators; returns those that have none."""
        unclaimed = []
        for chunk in chunks:
            inbox = self._inboxes.get(chunk.seq)
            if inbox is None:
                unclaimed.append(chunk)
            else:
                inbox.append(chunk)
        return unclaimed

    def _round(self) -> list[Chunk]:
        start = time.perf_counter() - self._uncounted_s
        self._admit()
        turns = [SequenceStep(s, r) for s, r in self._slots.active() if self._slots.is_read(s)]
        self.drafting.draft(turns, self.depth)  # 1 depth, 2 draft
        rows = [t.rows() for t in turns]
        room = self.limits.n_batch - sum(len(r.tokens) for r in rows)
        unread = self._slots.prompt_rows(min(room, self._chunker.n_rows(is_alone=not rows)))
        prompts = [r for r in unread if not r.n_outputs]
        arriving = self._arriving([r for r in unread if r.n_outputs])
        turns += arriving
        rows += [t.rows() for t in arriving]
        if not rows and not prompts:
            return []
        step = self._decode([*rows, *prompts])  # 3 target
        outputs, read = step.outputs[: len(rows)], step.outputs[len(rows) :]
        outcomes = [  # 4 judge
            t.judge(out.logits, self.limits.end_tokens)
            for t, out in zip(turns, outputs, strict=True)
        ]
        certain = [  # 5 keep
            self._keep(*kept) for kept in zip(turns, outcomes, outputs, strict=True)
        ]
        certain += [_seen(*seen) for seen in zip(prompts, read, strict=True)]
        self.drafting.observe(certain)
        times = RoundTimes(start, step.seconds, self.drafting.seconds_of)
        seconds = self._count(list(zip(turns, outcomes, strict=True)), prompts, times)
        unfinished = {r.seq for r in prompts}
        reading = [Chunk(r.id, [], 0) for s, r in self._slots.active() if s.seq in unfinished]
        emitted = [self._emit(t, o) for t, o in zip(turns, outcomes, strict=True)]  # 6 emit
        self._uncounted_s = time.perf_counter() - start - seconds
        return emitted + reading

    def _arriving(self, ends: Sequence[Rows]) -> list[SequenceStep]:
        """The turns of those whose prompt's last rows are read now."""
        if not ends:
            return []
        first = {r.seq: r.pos for r in ends}
        return [SequenceStep(s, r, first[s.seq]) for s, r in self._slots.active() if s.seq in first]

    def _admit(self) -> None:
        """Gives free slots to queued requests, in the order they came."""
        while self._queue and self._slots.admit(self._queue[0]):
            self._queue.popleft()

    def _decode(self, rows: Sequence[Rows]) -> Step:
        """The target's decode. When no cell is free, idle prefixes give way and it is tried
        again."""
        try:
            return self._target.decode(rows)
        except DecodeError as error:
            if error.code != NO_CELLS or not self._slots.evict_idle():
                raise
            log.info("%s", CACHE_FULL)
            self.observers.fell_back("cache_full", CACHE_FULL)
            return self._target.decode(rows)

    # -- after the decode ----------------------------------------------------------------------

    def _keep(self, turn: SequenceStep, outcome: Outcome, output: Output) -> Rows:
        """Commits tokens and drops the rows behind them; the rows that have become certain."""
        tokens, n = turn.slot.tokens, len(outcome.committed)
        pos = len(tokens) - 1
        tokens += outcome.committed
        turn.request.chain.commit(outcome.committed)
        if outcome.finish in ("stop", "failed"):
            n += 1  # what the end follows is decoded and certain, and may be all that can be kept
        self._target.rewind(turn.seq, pos + n)
        return _seen(Rows(turn.seq, turn.first, tokens[turn.first : pos + n]), output)

    def _count(
        self,
        judged: Sequence[tuple[SequenceStep, Outcome]],
        prompts: Sequence[Rows],
        times: RoundTimes,
    ) -> float:
        """Counts, per request and for the depth decision. Returns the seconds that were counted:
        what comes after is the next round's."""
        seconds = time.perf_counter() - times.start
        n_prompt = {r.seq: len(r.tokens) for r in prompts}
        n_prompt |= {t.seq: t.n_prompt for t, _ in judged if t.n_prompt}
        if n_prompt:
            self._chunker.update(sum(n_prompt.values()), times.target_s)
            for slot, request in self._slots.active():
                if slot.seq in n_prompt:
                    request.stats.count_prompt(n_prompt[slot.seq], seconds)
        for turn, outcome in judged:
            turn.count(outcome, times, seconds)
        n_prefill = sum(n_prompt.values())
        decided = [one for one in judged if not one[0].n_prompt]
        self.drafting.learn(self.depth, decided, n_prefill, times, seconds)
        if self.observers:
            load = EngineLoad(n_prefill, self._slots.n_cells(), len(self._queue))
            self.observers.round(judged, load, times, seconds)
        return seconds

    def _emit(self, turn: SequenceStep, outcome: Outcome) -> Chunk:
        n_from_draft = min(outcome.n_accepted, len(outcome.committed))
        chunk = Chunk(
            seq=turn.request.id,
            tokens=outcome.committed,
            n_from_draft=n_from_draft,
            logprobs=outcome.logprobs,
            source=turn.draft.source,
            n_drafted=len(turn.draft.tokens),
            error=outcome.error,
        )
        return self._finish(turn.slot, chunk, outcome.finish) if outcome.finish else chunk

    def _finish(self, slot: Slot, chunk: Chunk, reason: FinishReason) -> Chunk:
        """Frees the slot. Its tokens stay, cut to what the target has decoded and one more, unless
        the request failed."""
        request = slot.request
        assert request
        if reason == "failed":
            self._slots.discard(slot)
        else:
            self._slots.release(slot)
        self.depth.forget(slot.seq)
        self.totals += request.stats
        return chunk._replace(finish_reason=reason, stats=request.stats)


def _seen(rows: Rows, output: Output) -> Rows:
    """`rows` with the hidden rows the target computed for them, of which `output` may hold more."""
    hidden = None if output.hidden is None else output.hidden[: len(rows.tokens)]
    return Rows(rows.seq, rows.pos, rows.tokens, 0, hidden)
