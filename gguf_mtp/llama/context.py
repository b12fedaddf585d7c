"""One llama.cpp context, checked against what llama.cpp answers with an abort of the process."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Any

import llama_cpp as L

from gguf_mtp.errors import NO_CELLS, CannotRewind, DecodeError, SavedStateError
from gguf_mtp.llama.batch_arrays import BatchArrays
from gguf_mtp.llama.buffer_breakdown import BufferBreakdown, breakdown
from gguf_mtp.llama.context_options import ContextOptions, new_context
from gguf_mtp.llama.context_rules import NO_RULES, ContextRules
from gguf_mtp.llama.hidden_buffers import HiddenBuffer, LayerInputs, NextnRows
from gguf_mtp.llama.log import Errors
from gguf_mtp.llama.output_buffer import OutputBuffer
from gguf_mtp.llama.recurrent_states import RecurrentStates, passes
from gguf_mtp.types import Output, Rows, Step

REFUSED = -1
"""llama_decode's code for a batch it does not take; ours for one it must not see."""


class Context:
    """A `types.Decoder` over one llama.cpp context with a unified KV cache.

    A cache of attention can drop any rows; one with recurrent layers those of the last draft (see
    `states`), or everything. It keeps `n_past` of every sequence itself, and builds batches in
    numpy arrays that it owns: no call into C per row, and llama.cpp never frees Python memory.
    """

    def __init__(
        self,
        model: Any,
        n_embd: int,
        n_vocab: int,
        options: ContextOptions,
        rules: ContextRules = NO_RULES,
        beside: Context | None = None,
    ) -> None:
        """`n_embd` is the width of a hidden row; `beside`: whose embedding and head are used."""
        self.options = options
        self._logits = OutputBuffer(n_vocab)
        self._n_past = [0] * options.n_seq
        self._n_embd = n_embd
        self._ctx: Any = new_context(model, options, rules, beside and beside._ctx)
        self._states = _states(model, self._ctx, options)
        self._memory = L.llama_get_memory(self._ctx)
        self.n_ctx: int = L.llama_n_ctx(self._ctx)
        self.n_decodes = 0
        self._hidden: HiddenBuffer | None = None
        if options.layers:
            self._hidden = LayerInputs(self._ctx, options.layers)
        elif options.hidden or options.is_mtp:
            is_masked = options.is_mtp and rules.masked_block
            self._hidden = NextnRows(self._ctx, n_embd, is_masked)
        self._batch = BatchArrays(options.n_batch, n_embd if options.is_mtp else 0)

    @property
    def n_hidden(self) -> int:
        """Width of a hidden row."""
        return self._n_embd

    def n_past(self, seq: int) -> int:
        return self._n_past[seq]

    def decode(self, rows: Sequence[Rows]) -> Step:
        """See `types.Decoder`. Raises `DecodeError` with nothing of the batch left in the cache."""
        self._check(rows)
        if self._states is None:
            step = self._pass(rows, rows, is_first=True)
        else:
            step = self._passes(rows)
            self._states.decoded(rows)
        for r in rows:
            self._n_past[r.seq] = r.pos + len(r.tokens)
        return step

    def rewind(self, seq: int, n_past: int) -> None:
        n_rows = self._n_past[seq] - n_past
        if n_rows <= 0:
            return  # seq_rm scans all cells, so it is not called for nothing
        if self._states is not None and n_past and not self._states.can_drop(seq, n_rows):
            raise CannotRewind(f"the state of this model after {n_past} rows is not kept")
        if not L.llama_memory_seq_rm(self._memory, seq, n_past, -1):
            raise CannotRewind(
                f"the KV cache of this model cannot drop rows {n_past} to {self._n_past[seq] - 1}"
            )
        self._n_past[seq] = n_past
        if self._states is not None:
            self._states.dropped(seq) if n_past else self._states.replaced(seq)

    def copy(self, src: int, dst: int, n_past: int) -> None:
        if src == dst:
            return
        states, is_whole = self._states, n_past >= self._n_past[src]
        if states is not None and not (is_whole and states.can_share(src)):
            # seq_cp would copy the state after the last row decoded, whatever range it is given.
            raise CannotRewind(f"the state of this model after {n_past} rows is not kept")
        self.rewind(dst, 0)
        L.llama_memory_seq_cp(self._memory, src, dst, 0, n_past if states is None else -1)
        self._n_past[dst] = min(n_past, self._n_past[src])
        if states is not None:
            states.shared(src, dst)

    def save(self, seq: int) -> bytes:
        size = L.llama_state_seq_get_size(self._ctx, seq)
        buffer = (ctypes.c_uint8 * size)()
        written = L.llama_state_seq_get_data(self._ctx, buffer, size, seq)
        return self._n_past[seq].to_bytes(8, "little") + bytes(buffer[:written])

    def load(self, seq: int, data: bytes) -> int:
        self.rewind(seq, 0)
        state = data[8:]
        buffer = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        with Errors() as errors:
            read = L.llama_state_seq_set_data(self._ctx, buffer, len(state), seq)
        if self._states is not None:
            self._states.replaced(seq)
        n_past = int.from_bytes(data[:8], "little")
        if read and n_past == L.llama_memory_seq_pos_max(self._memory, seq) + 1:
            self._n_past[seq] = n_past
            return n_past
        self._drop_all(seq)
        if read == 0:
            raise SavedStateError(f"llama.cpp refused the saved sequence: {errors.reason()}")
        raise SavedStateError("the saved sequence has other rows in its cache than it says")

    def _drop_all(self, seq: int) -> None:
        """Whatever a wrong state has put into the cache. Rows of negative positions cannot be
        named: for them every sequence has to go, and be read again."""
        L.llama_memory_seq_rm(self._memory, seq, -1, -1)
        if L.llama_memory_seq_pos_max(self._memory, seq) == -1:
            return
        L.llama_memory_clear(self._memory, False)
        for one in range(self.options.n_seq):
            self._n_past[one] = 0
            if self._states is not None:
                self._states.replaced(one)

    def memory(self) -> dict[str, BufferBreakdown]:
        """What this context and its model take on each device; {} where llama.cpp cannot be
        asked."""
        return breakdown(self._ctx)

    def close(self) -> None:
        if self._ctx:
            L.llama_free(self._ctx)
            self._ctx = None

    def _passes(self, rows: Sequence[Rows]) -> Step:
        """As many as keep every draft's states."""
        groups = passes(rows)
        found: dict[int, Output] = {}
        seconds = 0.0
        for i, group in enumerate(groups):
            outputs, spent = self._pass(group, rows, is_first=i == 0)
            if i + 1 < len(groups):  # the next pass writes where these lie
                outputs = [_copied(output) for output in outputs]
            found |= {r.seq: output for r, output in zip(group, outputs, strict=True)}
            seconds += spent
        return Step([found[r.seq] for r in rows], seconds)

    def _pass(self, group: Sequence[Rows], batch: Sequence[Rows], is_first: bool) -> Step:
        """One llama_decode. When it fails, all of `batch` leaves the cache."""
        batch_arrays = self._arrays_for(group)
        n_rows, n_outputs = batch_arrays.fill(group)
        start = time.perf_counter()
        code = L.llama_decode(self._ctx, batch_arrays.struct)
        L.llama_synchronize(self._ctx)
        seconds = time.perf_counter() - start
        self.n_decodes += 1
        if code != 0:
            is_untouched = is_first and code in (NO_CELLS, REFUSED)
            self._take_back(batch, is_untouched)
            raise DecodeError(code, f"decoding {n_rows} rows of {len(group)} sequences failed")
        return Step(self._outputs(group, n_rows, n_outputs), seconds)

    def _take_back(self, rows: Sequence[Rows], is_untouched: bool) -> None:
        """Some codes leave the rows of finished sub-batches behind; states that were written over
        are gone, and the sequence with them."""
        for r in rows:
            if self._states is not None and not is_untouched:
                self._n_past[r.seq] = 0
                self._states.replaced(r.seq)
            L.llama_memory_seq_rm(self._memory, r.seq, self._n_past[r.seq], -1)

    def _check(self, rows: Sequence[Rows]) -> None:
        """What llama.cpp would answer with an abort, or store wrongly, is refused here."""
        if len({r.seq for r in rows}) < len(rows):
            raise refused("a sequence appears twice")
        n_rows = n_outputs = 0
        for r in rows:
            if not 0 <= r.seq < self.options.n_seq:
                raise refused(f"sequence {r.seq} does not exist")
            past = self._n_past[r.seq]
            # An MTP sequence begins at position 1: its row p + 1 takes the target's hidden row p.
            if r.pos != past and not (past == 0 and r.pos == 1 and self.options.is_mtp):
                raise refused(
                    f"sequence {r.seq} ends at position {past}, but its rows begin at {r.pos}"
                )
            if r.hidden is not None and r.hidden.shape != (len(r.tokens), self._n_embd):
                raise refused(f"its hidden rows have the shape {r.hidden.shape}")
            n_rows += len(r.tokens)
            n_outputs += r.n_outputs
        if not 0 < n_rows <= self.options.n_batch:
            raise refused(f"it has {n_rows} rows, not 1 to {self.options.n_batch}")
        if n_outputs > self.options.n_outputs:
            raise refused(f"it asks for the logits of {n_outputs} rows, which is too many")
        self._check_kind(rows)

    def _check_kind(self, rows: Sequence[Rows]) -> None:
        if any((r.hidden is not None) != self.options.is_mtp for r in rows):
            raise refused("hidden rows must be given for an MTP context, and only there")

    def _arrays_for(self, _rows: Sequence[Rows]) -> BatchArrays:
        return self._batch

    def _outputs(self, rows: Sequence[Rows], n_rows: int, n_outputs: int) -> list[Output]:
        logits = self._logits.rows(L.llama_get_logits(self._ctx), n_outputs)
        hidden, per_output = None, False
        if self._hidden is not None:
            per_output = self._hidden.per_output
            hidden = self._hidden.rows(n_outputs if per_output else n_rows)
        outputs, row, out = [], 0, 0
        for r in rows:
            n = r.n_outputs if per_output else len(r.tokens)
            h = None if hidden is None else hidden[row : row + n]
            outputs.append(Output(logits[out : out + r.n_outputs], h))
            row, out = row + n, out + r.n_outputs
        return outputs


def refused(what: str) -> DecodeError:
    """For a batch that llama.cpp must not see."""
    return DecodeError(REFUSED, f"invalid batch: {what}")


def _states(model: Any, ctx: Any, options: ContextOptions) -> RecurrentStates | None:
    """None where there are none: the MTP block of such a model is a layer of attention."""
    has_states = L.llama_model_is_recurrent(model) or L.llama_model_is_hybrid(model)
    if options.is_mtp or not has_states:
        return None
    return RecurrentStates(
        options.n_seq, L.llama_n_rs_seq(ctx)
    )  # 0 where the architecture keeps one only


def _copied(output: Output) -> Output:
    return Output(output.logits.copy(), None if output.hidden is None else output.hidden.copy())
