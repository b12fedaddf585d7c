"""One llama.cpp context, checked against what llama.cpp answers with an abort of the process."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import llama_cpp as L

from gguf_mtp.errors import NO_CELLS, CannotRewind, DecodeError, LoadFailed, SavedStateError
from gguf_mtp.gguf.ggml_types import TENSOR_TYPES
from gguf_mtp.llama.batch_arrays import BatchArrays
from gguf_mtp.llama.binding import nextn, reserve_again
from gguf_mtp.llama.buffer_breakdown import BufferBreakdown, breakdown
from gguf_mtp.llama.context_rules import NO_RULES, ContextRules
from gguf_mtp.llama.log import Errors
from gguf_mtp.llama.output_buffer import OutputBuffer
from gguf_mtp.llama.recurrent_states import RecurrentStates, passes
from gguf_mtp.types import Output, Rows, Step

REFUSED = -1
"""llama_decode's code for a batch it does not take; ours for one it must not see."""

_FLASH = {"auto": -1, "off": 0, "on": 1}
CACHE_TYPE_NUMBERS = {t.name.lower(): number for number, t in TENSOR_TYPES.items()}


@dataclass(frozen=True, slots=True)
class ContextOptions:
    """One context. `n_ctx` is the cells of all `n_seq` sequences together, `n_batch` the most rows
    of one decode, `n_outputs` the most rows with logits. `is_mtp` runs the NextN block instead of
    the trunk; `hidden` puts a hidden row out for every row. `strict` makes results independent of
    the batch's shape: F32 KV cache, no flash attention (use one thread and F32 weights with it); it
    overrides `cache_k`, `cache_v` and `flash` ("auto", "on", "off"). Without `kv_offload` the cache
    stays with the CPU; `op_offload` lets large batches copy the CPU's weights to a device. Of a
    model with recurrent layers, `n_rewind` is how many rows of a draft can be dropped, at the price
    of as many more states for each sequence; `n_batch` must be larger than that by 2.
    """

    n_ctx: int
    n_seq: int
    n_batch: int
    n_outputs: int
    n_threads: int
    is_mtp: bool = False
    hidden: bool = False
    strict: bool = False
    cache_k: str = "f16"
    cache_v: str = "f16"
    flash: str = "auto"
    kv_offload: bool = True
    op_offload: bool = True
    n_rewind: int = 0


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
    ) -> None:
        """`n_embd` is the width of a hidden row."""
        self.options = options
        self._logits, self._hidden = OutputBuffer(n_vocab), OutputBuffer(n_embd)
        self._n_past = [0] * options.n_seq
        self._n_embd = n_embd
        self._ctx = _new_context(model, options, rules)
        self._states = _states(model, self._ctx, options)
        self._memory = L.llama_get_memory(self._ctx)
        self.n_ctx: int = L.llama_n_ctx(self._ctx)
        self.n_decodes = 0
        self._get_hidden: Any = None
        self._is_masked = options.is_mtp and rules.masked_block
        if options.hidden or options.is_mtp:
            nextn("llama_set_embeddings_nextn")(self._ctx, True, self._is_masked)
            reserve_again(self._ctx)
            self._get_hidden = nextn("llama_get_embeddings_nextn")
        self._batch = BatchArrays(options.n_batch, n_embd if options.is_mtp else 0)

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
        n_rows, n_outputs = self._batch.fill(group)
        start = time.perf_counter()
        code = L.llama_decode(self._ctx, self._batch.struct)
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
            raise _refusal("a sequence appears twice")
        n_rows = n_outputs = 0
        for r in rows:
            if not 0 <= r.seq < self.options.n_seq:
                raise _refusal(f"sequence {r.seq} does not exist")
            past = self._n_past[r.seq]
            # An MTP sequence begins at position 1: its row p + 1 takes the target's hidden row p.
            if r.pos != past and not (past == 0 and r.pos == 1 and self.options.is_mtp):
                raise _refusal(
                    f"sequence {r.seq} ends at position {past}, but its rows begin at {r.pos}"
                )
            if (r.hidden is not None) != self.options.is_mtp:
                raise _refusal("hidden rows must be given for an MTP context, and only there")
            if r.hidden is not None and r.hidden.shape != (len(r.tokens), self._n_embd):
                raise _refusal(f"its hidden rows have the shape {r.hidden.shape}")
            n_rows += len(r.tokens)
            n_outputs += r.n_outputs
        if not 0 < n_rows <= self.options.n_batch:
            raise _refusal(f"it has {n_rows} rows, not 1 to {self.options.n_batch}")
        if n_outputs > self.options.n_outputs:
            raise _refusal(f"it asks for the logits of {n_outputs} rows, which is too many")

    def _outputs(self, rows: Sequence[Rows], n_rows: int, n_outputs: int) -> list[Output]:
        logits = self._logits.rows(L.llama_get_logits(self._ctx), n_outputs)
        hidden = None
        if self._get_hidden is not None:
            n_hidden = n_outputs if self._is_masked else n_rows
            hidden = self._hidden.rows(self._get_hidden(self._ctx), n_hidden)
        outputs, row, out = [], 0, 0
        for r in rows:
            n = r.n_outputs if self._is_masked else len(r.tokens)
            h = None if hidden is None else hidden[row : row + n]
            outputs.append(Output(logits[out : out + r.n_outputs], h))
            row, out = row + n, out + r.n_outputs
        return outputs


def _refusal(what: str) -> DecodeError:
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


def _new_context(model: Any, options: ContextOptions, rules: ContextRules) -> Any:
    params = L.llama_context_default_params()
    params.n_ctx, params.n_seq_max = options.n_ctx, options.n_seq
    params.n_batch = params.n_ubatch = options.n_batch
    params.n_outputs_max = max(options.n_outputs, options.n_seq)  # fewer than n_seq_max aborts
    params.n_threads = params.n_threads_batch = options.n_threads
    params.offload_kqv, params.op_offload = options.kv_offload, options.op_offload
    params.type_k, params.type_v = (
        CACHE_TYPE_NUMBERS[name] for name in (options.cache_k, options.cache_v)
    )
    params.flash_attn_type = _FLASH[options.flash]
    params.n_rs_seq = options.n_rewind
    if options.n_rewind + 1 >= options.n_batch:  # llama.cpp would abort in the first decode
        raise LoadFailed(
            f"cannot rewind {options.n_rewind} rows with a batch size of {options.n_batch}; "
            "use a larger batch size"
        )
    params.kv_unified, params.swa_full = rules.unified, rules.full_window
    if options.is_mtp:
        params.ctx_type = L.LLAMA_CONTEXT_TYPE_MTP
    if options.strict:
        params.type_k = params.type_v = L.GGML_TYPE_F32
        params.flash_attn_type = L.LLAMA_FLASH_ATTN_TYPE_DISABLED
    with Errors() as errors:
        ctx = L.llama_init_from_model(model, params)
    if not ctx:
        raise LoadFailed(f"cannot create a context of {options.n_ctx} cells: {errors.reason()}")
    return ctx
