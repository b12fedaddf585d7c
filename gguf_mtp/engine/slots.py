"""Who sits where in the KV caches: admission, reuse of what was read before, and what stays.

Every change is made to the target's cache and the drafters' together. Knows no sampling, no depth
and no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gguf_mtp.engine.drafting import Drafting
from gguf_mtp.engine.request import Request, SequenceStep, Slot
from gguf_mtp.errors import CannotRewind, RequestError, SavedStateError
from gguf_mtp.types import Decoder, Rows


class Slots:
    """`n_seq` slots over a target and its drafters. While some slot is active, idle ones hold at
    most `n_idle` cells of their own."""

    def __init__(
        self, target: Decoder, drafting: Drafting, n_seq: int, n_idle: int = 1 << 40
    ) -> None:
        self._drafting = drafting
        self._n_idle = n_idle
        self._target = target
        self._slots = [Slot(seq) for seq in range(n_seq)]
        self._n_uses = 0

    def active(self) -> list[tuple[Slot, Request]]:
        """Slots with a request, in the order of admission."""
        taken = [(s, s.request) for s in self._slots if s.request]
        return sorted(taken, key=lambda pair: pair[1].id)

    def n_read(self, slot: Slot) -> int:
        """How many of the slot's tokens are certain and known to the caches, the last one included
        though the target has not decoded it."""
        return min(self._target.n_past(slot.seq) + 1, len(slot.tokens))

    def is_read(self, slot: Slot) -> bool:
        """Whether the prompt is read: from here on `n_past == len(tokens) - 1`."""
        return self.n_read(slot) == len(slot.tokens)

    def answering(self) -> list[SequenceStep]:
        """A step for each sequence whose prompt is read."""
        return [SequenceStep(s, r) for s, r in self.active() if self.is_read(s)]

    def arriving(self, ends: Sequence[Rows]) -> list[SequenceStep]:
        """A step for each sequence whose prompt's last rows are read now."""
        if not ends:
            return []
        first = {rows.seq: rows.pos for rows in ends}
        return [SequenceStep(s, r, first[s.seq]) for s, r in self.active() if s.seq in first]

    def n_cells(self) -> int:
        """Positions that the target's cache holds, those of idle slots included."""
        return sum(self._target.n_past(slot.seq) for slot in self._slots)

    def admit(self, request: Request) -> bool:
        """Gives the request a slot that begins with as much of its prompt as any; False if all are
        taken."""
        free = [s for s in self._slots if not s.request]
        if not free:
            return False
        if request.options.cache_prompt:
            source, n_common = self._best_source(request.prompt)
            slot = _destination(free, source, n_common)
            n_rows = self._begin(slot, source, n_common, len(request.prompt) - 1)
        else:
            slot, n_rows = _oldest(free), 0
            self._empty(slot)
        request.stats.cached_tokens = n_rows
        slot.tokens, slot.request = list(request.prompt), request
        self._use(slot)
        self._limit_idle()
        return True

    def release(self, slot: Slot) -> None:
        """Ends the slot's request. Its tokens stay, as far as they were read, for a later
        prompt."""
        slot.tokens = slot.tokens[: self.n_read(slot)]
        slot.request = None
        self._use(slot)
        self._limit_idle()

    def discard(self, slot: Slot) -> None:
        """Ends the slot's request and empties its caches: what they hold cannot be trusted."""
        slot.request = None
        self._empty(slot)

    def evict_idle(self) -> bool:
        """Empties the idle slots; whether that freed any cell."""
        idle = [s for s in self._slots if not s.request and self._target.n_past(s.seq)]
        for slot in idle:
            self._empty(slot)
        return bool(idle)

    def _limit_idle(self) -> None:
        """Empties idle slots, the one used longest ago first, until the rest may stay."""
        active = [slot for slot, _ in self.active()]
        if not active:
            return  # nobody is slowed
        left = self._n_idle
        for slot in sorted(self._slots, key=lambda s: -s.last_use):
            if slot.request or not slot.tokens:
                continue
            shared = max(s.n_common(slot.tokens) for s in active)  # in cells of theirs
            left -= len(slot.tokens) - shared
            if left < 0:
                self._empty(slot)

    def _empty(self, slot: Slot) -> None:
        self._cut(slot, 0)
        slot.tokens = []

    def save(self, tokens: Sequence[int]) -> tuple[list[int], dict[str, bytes]]:
        """What the caches hold of the beginning of `tokens`: the tokens, and each cache's bytes.

        Raises `SavedStateError` when they hold nothing of it.
        """
        source, n_common = self._best_source(tokens)
        if n_common < 2 or source.request:
            raise SavedStateError("nothing to save: no idle sequence starts with these tokens")
        if not self._is_whole(source, n_common):
            self._cut_to_save(source, n_common)
        target = {"target": self._target.save(source.seq)}
        return source.tokens, target | self._drafting.save(source.seq)

    def load(self, tokens: Sequence[int], parts: Mapping[str, bytes]) -> None:
        """Puts a saved sequence into the idle slot used longest ago.

        Raises `SavedStateError`, and `RequestError` when no slot is idle; the slot is empty then.
        """
        free = [s for s in self._slots if not s.request]
        if not free:
            raise RequestError("all slots are busy; load the sequence when one is idle")
        slot = min(free, key=lambda s: (len(s.tokens) > 0, s.last_use))
        slot.tokens = []
        try:
            n_past = self._target.load(slot.seq, parts["target"])
            if n_past > len(tokens):
                raise SavedStateError(
                    f"the saved sequence has {len(tokens)} tokens, but {n_past} rows in its cache"
                )
            self._drafting.load(slot.seq, parts)
        except SavedStateError:
            self._cut(slot, 0)
            raise
        slot.tokens = list(tokens)
        self._use(slot)

    def prompt_rows(self, room: int) -> list[Rows]:
        """The next rows of unread prompts, oldest request first, at most `room` in all. The last
        row of a prompt wants logits: the first token of the answer comes from it."""
        rows = []
        for slot, _ in self.active():
            pos = self._target.n_past(slot.seq)
            n = min(len(slot.tokens) - 1 - pos, room)
            if n > 0:
                if pos == 0:  # a failed decode may have cost the target what drafters still know
                    self._drafting.rewind(slot.seq, 0)
                n_outputs = int(pos + n == len(slot.tokens) - 1 and n < room)
                rows.append(Rows(slot.seq, pos, slot.tokens[pos : pos + n + n_outputs], n_outputs))
                room -= n + n_outputs
        return rows

    def _best_source(self, prompt: Sequence[int]) -> tuple[Slot, int]:
        """The slot that holds most of the prompt's beginning, and how many tokens of it."""
        held = [(min(s.n_common(prompt), self.n_read(s)), s) for s in self._slots]
        n_common, slot = max(held, key=lambda pair: (pair[0], pair[1].last_use))
        return slot, n_common

    def _begin(self, slot: Slot, source: Slot, n_common: int, n_most: int) -> int:
        """Makes all caches of `slot` hold the shared beginning; how many rows need no decoding, at
        most `n_most`.

        The last shared token is decoded again: its hidden row makes a drafter's next row.
        """
        if slot is source and n_common <= n_most and self._is_whole(slot, n_common):
            return n_common
        keep = max(n_common - 1, 0)
        try:
            if slot is source:
                self._cut(slot, n_common)
            elif keep:
                self._target.copy(source.seq, slot.seq, keep)
                self._drafting.copy(source.seq, slot.seq, n_common)
            else:
                self._cut(slot, 0)
        except CannotRewind:  # a recurrent cache keeps its newest states only, or can be emptied
            self._cut(slot, 0)
            return 0
        return keep

    def _is_whole(self, slot: Slot, n_tokens: int) -> bool:
        """Whether the first `n_tokens` are all that the slot holds, every one decoded and observed:
        so it is behind an answer that ended by itself."""
        return self._target.n_past(slot.seq) == n_tokens == len(slot.tokens)

    def _cut_to_save(self, slot: Slot, n_tokens: int) -> None:
        try:
            self._cut(slot, n_tokens)
        except CannotRewind as error:
            raise SavedStateError(f"cannot save the first {n_tokens} tokens: {error}") from error
        slot.tokens = slot.tokens[:n_tokens]

    def _cut(self, slot: Slot, n_tokens: int) -> None:
        """Cuts all caches back to the first `n_tokens`, of which the target forgets the last."""
        self._target.rewind(slot.seq, max(n_tokens - 1, 0))
        self._drafting.rewind(slot.seq, n_tokens)

    def _use(self, slot: Slot) -> None:
        self._n_uses += 1
        slot.last_use = self._n_uses


def _destination(free: Sequence[Slot], source: Slot, n_common: int) -> Slot:
    """The source itself when the prompt goes on with what it holds, otherwise the free slot that
    was used longest ago: what the source holds beyond the shared part may be asked for again."""
    goes_on = 10 * n_common >= 9 * len(source.tokens) > 0
    if not source.request and (goes_on or len(free) == 1):
        return source
    return _oldest([s for s in free if s is not source] or free)


def _oldest(free: Sequence[Slot]) -> Slot:
    """An empty one, or the one used longest ago."""
    return min(free, key=lambda s: (len(s.tokens) > 0, s.last_use))
