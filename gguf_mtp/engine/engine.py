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
from gguf_mtp.engine.batch import Batch, certain_rows
from gguf_mtp.engine.chunk_stream import ChunkStream, Inboxes
from gguf_mtp.engine.config import EngineLimits
from gguf_mtp.engine.drafting import Drafting
from gguf_mtp.engine.observers import EngineLoad, Observers
from gguf_mtp.engine.prefill_chunk import PrefillChunker
from gguf_mtp.engine.request import Outcome, Request, RoundTimes, SequenceStep, Slot
from gguf_mtp.engine.slots import Slots
from gguf_mtp.engine.state_file import pack, unpack
from gguf_mtp.errors import NO_CELLS, ContextFull, DecodeError, RequestError
from gguf_mtp.params import PLAIN, RequestOptions, SamplingParams
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
        self._inboxes = Inboxes()
        self._is_closed = False
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
        options: RequestOptions = PLAIN,
    ) -> int:
        """Queues a request and returns its id, which its chunks carry as `seq`.

        Raises as `EngineLimits.check` does.
        """
        self._check_open()
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

    def open(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        max_tokens: int,
        options: RequestOptions = PLAIN,
    ) -> ChunkStream:
        """A stream of the answers to `prompts`. Several streams may be read in turn. `options` with
        a constraint are for one prompt."""
        for prompt in prompts:  # all are taken or none
            self.limits.check(prompt, max_tokens)
        ids = [self.submit(prompt, params, max_tokens, options) for prompt in prompts]
        return ChunkStream(ids, self._inboxes, self._round, self.cancel)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        max_tokens: int,
        options: RequestOptions = PLAIN,
    ) -> Iterator[Chunk]:
        """As `open`, as a generator: closing it cancels."""
        stream = self.open(prompts, params, max_tokens, options)
        try:
            yield from stream
        finally:
            stream.close()

    def step(self) -> list[Chunk]:
        """One round for every active sequence; a chunk for each, empty while its prompt is read.

        Chunks of requests that `open` submitted go to its streams. Raises `DecodeError` from the
        target: then no sequence has moved.
        """
        self._inboxes.distribute(self._round())
        return self._inboxes.take_unclaimed()

    def _round(self) -> list[Chunk]:
        start = time.perf_counter() - self._uncounted_s
        self._check_open()
        self._admit()
        answering = self._slots.answering()
        self.drafting.draft(answering, self.depth)  # 1 depth, 2 draft
        batch = self._with_prompts(answering)
        if not batch.rows:
            return []
        decoded = self._decode(batch.rows)  # 3 target
        batch.judge(decoded, self.limits.end_tokens)  # 4 judge
        self.drafting.observe(self._keep(batch))  # 5 keep
        times = RoundTimes(start, decoded.seconds, self.drafting.seconds_of)
        seconds = self._count(batch, times)
        chunks = self._emit(batch)  # 6 emit
        self._uncounted_s = time.perf_counter() - start - seconds
        return chunks

    def _with_prompts(self, answering: Sequence[SequenceStep]) -> Batch:
        """A batch of those who answer, with as many rows of unread prompts as fit beside them."""
        n_taken = sum(1 + len(step.draft.tokens) for step in answering)
        n_chunk = self._chunker.n_rows(is_alone=not answering)
        unread = self._slots.prompt_rows(min(self.limits.n_batch - n_taken, n_chunk))
        arriving = self._slots.arriving([rows for rows in unread if rows.n_outputs])
        return Batch([*answering, *arriving], [rows for rows in unread if not rows.n_outputs])

    def close(self) -> None:
        """Drops every request; the decoders may be freed afterwards. Whoever asks for more gets a
        `RequestError`."""
        self._is_closed = True
        self._queue.clear()
        for slot, _ in self._slots.active():
            slot.request = None

    def _check_open(self) -> None:
        if self._is_closed:
            raise RequestError("the model is closed")

    def _admit(self) -> None:
        """Gives free slots to queued requests, in the order they came; not to abandoned ones."""
        while self._inboxes.abandoned:
            self.cancel(self._inboxes.abandoned.popleft())
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

    def _keep(self, batch: Batch) -> list[Rows]:
        """Commits what was accepted; returns the rows that have become certain."""
        kept = [
            self._keep_one(step, outcome, output)
            for (step, outcome), output in zip(batch.judged, batch.outputs, strict=True)
        ]
        return [*kept, *batch.prompts_read()]

    def _keep_one(self, step: SequenceStep, outcome: Outcome, output: Output) -> Rows:
        """Commits tokens and drops the rows behind them; the rows that have become certain."""
        tokens, n = step.slot.tokens, len(outcome.committed)
        pos = len(tokens) - 1
        tokens += outcome.committed
        step.request.chain.commit(outcome.committed)
        if outcome.finish in ("stop", "failed"):
            n += 1  # what the end follows is decoded and certain, and may be all that can be kept
        self._target.rewind(step.seq, pos + n)
        return certain_rows(Rows(step.seq, step.first, tokens[step.first : pos + n]), output)

    def _count(self, batch: Batch, times: RoundTimes) -> float:
        """Counts, per request and for the depth decision. Returns the seconds that were counted:
        what comes after is the next round's."""
        seconds = time.perf_counter() - times.start
        n_prompt, judged = batch.n_prefill, batch.judged
        n_prefill = sum(n_prompt.values())
        if n_prompt:
            self._chunker.update(n_prefill, times.target_s)
            for slot, request in self._slots.active():
                if slot.seq in n_prompt:
                    request.stats.count_prompt(n_prompt[slot.seq], seconds)
        for step, outcome in judged:
            step.count(outcome, times, seconds)
        decided = [one for one in judged if not one[0].n_prompt]
        self.drafting.learn(self.depth, decided, n_prefill, times, seconds)
        if self.observers:
            load = EngineLoad(n_prefill, self._slots.n_cells(), len(self._queue))
            self.observers.round(judged, load, times, seconds)
        return seconds

    def _emit(self, batch: Batch) -> list[Chunk]:
        """A chunk for every sequence of the batch, empty for those whose prompt is read on."""
        chunks = [self._chunk(step, outcome) for step, outcome in batch.judged]
        if batch.prompts:
            unfinished = {rows.seq for rows in batch.prompts}
            active = self._slots.active()
            chunks += [Chunk(request.id, [], 0) for s, request in active if s.seq in unfinished]
        return chunks

    def _chunk(self, step: SequenceStep, outcome: Outcome) -> Chunk:
        chunk = Chunk(
            seq=step.request.id,
            tokens=outcome.committed,
            n_from_draft=min(outcome.n_accepted, len(outcome.committed)),
            logprobs=outcome.logprobs,
            source=step.draft.source,
            n_drafted=len(step.draft.tokens),
            error=outcome.error,
        )
        return self._finish(step.slot, chunk, outcome.finish) if outcome.finish else chunk

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
