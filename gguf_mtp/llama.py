"""The only module that touches llama_cpp: a model, its contexts, its vocabulary.

It knows nothing of sequences' meaning, drafting or text formats. llama.cpp answers misuse with an
abort of the process (`GGML_ASSERT`), so everything that could reach one is checked here first and
raised as a sentence. Written against llama-cpp-python 0.3.36; the calls that put hidden rows out
are C++ exports which that package calls unstable, so they are looked up by name when a model is
loaded.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import llama_cpp as L
import llama_cpp._ggml as llama_cpp_ggml
import numpy as np
from numpy.typing import NDArray

from gguf_mtp.errors import (
    CannotRewind,
    DecodeError,
    LoadFailed,
    SavedStateError,
    UnsupportedModel,
)
from gguf_mtp.types import Floats, Output, Rows, Step

LLAMA_CPP_PYTHON = "0.3.36"

REFUSED = -1
"""llama_decode's code for a batch it does not take; ours for one it must not see."""

log = logging.getLogger(__name__)

_LEVELS = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.INFO, 4: logging.ERROR}
"""ggml's debug, info, warn and error -> ours. Its warnings are remarks on healthy files."""


@L.llama_log_callback  # type: ignore[untyped-decorator]
def _forward_log(level: int, text: bytes, _user: Any) -> None:
    line = text.decode(errors="replace").rstrip()  # a piece of a token may be cut UTF-8
    if line:
        log.log(_LEVELS.get(level, logging.DEBUG), "%s", line)


class _Errors(logging.Filter):
    """Within it, what llama.cpp logs as an error is kept instead of shown: the caller raises it."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.ERROR:
            return True
        self.lines.append(record.getMessage())
        return False

    def __enter__(self) -> _Errors:
        log.addFilter(self)
        return self

    def __exit__(self, *_: object) -> None:
        log.removeFilter(self)

    def reason(self) -> str:
        """The first error: later ones only say that loading failed."""
        return self.lines[0] if self.lines else "llama.cpp gave no reason"


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How weights are loaded. `n_gpu_layers` counts the MTP block and the output as layers; -1 is
    all."""

    n_gpu_layers: int = -1
    load_mtp: bool = False


@dataclass(frozen=True, slots=True)
class ContextOptions:
    """One context. `n_ctx` is the cells of all `n_seq` sequences together, `n_batch` the most rows
    of one decode, `n_outputs` the most rows with logits. `is_mtp` runs the NextN block instead of
    the trunk; `hidden` puts a hidden row out for every row. `strict` makes results independent of
    the batch's shape: F32 KV cache, no flash attention (use one thread and F32 weights with it).
    """

    n_ctx: int
    n_seq: int
    n_batch: int
    n_outputs: int
    n_threads: int
    is_mtp: bool = False
    hidden: bool = False
    strict: bool = False


class Model:
    """The weights and the vocabulary of one GGUF. A context manager; closing it closes its
    contexts."""

    def __init__(self, path: str, options: ModelOptions = ModelOptions()) -> None:
        """Loads `path`. Raises `LoadFailed` with llama.cpp's own reason.

        Check the header first (`metadata.read`): llama.cpp aborts the process on some bad files.
        """
        _check_binding()
        L.llama_log_set(_forward_log, ctypes.c_void_p(0))
        self._stack = ExitStack()
        params = L.llama_model_default_params()
        params.load_mtp = options.load_mtp
        params.n_gpu_layers = options.n_gpu_layers
        with _Errors() as errors:
            self._model = L.llama_model_load_from_file(path.encode(), params)
        if not self._model:
            raise LoadFailed(f"{path}: {errors.reason()}")
        self._stack.callback(L.llama_model_free, self._model)
        self.n_embd: int = L.llama_model_n_embd(self._model)
        # The header's count stays when the block's weights were not loaded; its graph would abort.
        self.n_mtp: int = L.llama_model_n_layer_nextn(self._model) if options.load_mtp else 0
        self.context_length: int = L.llama_model_n_ctx_train(self._model)
        self.vocab = Vocab(self._model)

    def context(self, options: ContextOptions) -> Context:
        """A new context. Raises `UnsupportedModel` (no MTP block) or `LoadFailed` (no memory)."""
        if options.is_mtp and self.n_mtp != 1:
            raise UnsupportedModel(
                f"{self.n_mtp} MTP blocks are loaded, but llama.cpp runs exactly one"
            )
        context = Context(self._model, self.n_embd, self.vocab.n_tokens, options)
        self._stack.callback(context.close)  # so that contexts die before the weights
        return context

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Vocab:
    """Tokens to text and back. Lives as long as its model."""

    def __init__(self, model: Any) -> None:
        self._vocab = L.llama_model_get_vocab(model)
        self.n_tokens: int = L.llama_vocab_n_tokens(self._vocab)
        self.adds_bos: bool = L.llama_vocab_get_add_bos(self._vocab)
        self.bos = self._text_of(L.llama_vocab_bos(self._vocab))
        self.eos = self._text_of(L.llama_vocab_eos(self._vocab))
        self.end_tokens = frozenset(
            t for t in range(self.n_tokens) if L.llama_vocab_is_eog(self._vocab, t)
        )
        template = L.llama_model_chat_template(model, None)
        self.chat_template: str | None = template.decode(errors="replace") if template else None
        self._pieces: dict[int, bytes] = {}

    def tokenize(self, text: str, add_special: bool, parse_special: bool = True) -> list[int]:
        """Token ids of `text`. `add_special` puts BOS in front when the model wants one;
        `parse_special` reads `<｜User｜>` and the like as the tokens they name."""
        raw = text.encode("utf-8", errors="replace")
        room = len(raw) + 2
        while True:
            ids = (L.llama_token * room)()
            n = L.llama_tokenize(self._vocab, raw, len(raw), ids, room, add_special, parse_special)
            if n >= 0:
                return list(ids[:n])
            room = -n

    def piece(self, token: int) -> bytes:
        """The bytes a token stands for; control tokens stand for none."""
        known = self._pieces.get(token)
        if known is None:
            known = self._pieces[token] = self._piece(token)
        return known

    def _piece(self, token: int) -> bytes:
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = L.llama_token_to_piece(self._vocab, token, buffer, size, 0, False)
            if n >= 0:
                return buffer.raw[:n]
            size = -n

    def _text_of(self, token: int) -> str:
        if token < 0:
            return ""
        return str(L.llama_vocab_get_text(self._vocab, token).decode(errors="replace"))


class Context:
    """A `types.Decoder` over one llama.cpp context with a unified KV cache.

    It keeps `n_past` of every sequence itself, and builds batches in numpy arrays that it owns: no
    call into C per row, and llama.cpp never frees Python memory.
    """

    def __init__(self, model: Any, n_embd: int, n_vocab: int, options: ContextOptions) -> None:
        self.options = options
        self._n_vocab, self._n_embd = n_vocab, n_embd
        self._n_past = [0] * options.n_seq
        self._ctx = _new_context(model, options)
        self._memory = L.llama_get_memory(self._ctx)
        self.n_ctx: int = L.llama_n_ctx(self._ctx)
        self.n_decodes = 0
        self._get_hidden: Any = None
        if options.hidden or options.is_mtp:
            # Unmasked in both kinds of context: masked, the pinned MTP graphs return the first rows
            # of a batch instead of its output rows.
            _nextn("llama_set_embeddings_nextn")(self._ctx, True, False)
            self._get_hidden = _nextn("llama_get_embeddings_nextn")
        self._batch = _Batch(options.n_batch, n_embd if options.is_mtp else 0)

    def n_past(self, seq: int) -> int:
        return self._n_past[seq]

    def decode(self, rows: Sequence[Rows]) -> Step:
        """See `types.Decoder`. Raises `DecodeError` with nothing of the batch left in the cache."""
        self._check(rows)
        n_rows, n_outputs = self._batch.fill(rows)
        start = time.perf_counter()
        code = L.llama_decode(self._ctx, self._batch.struct)
        L.llama_synchronize(self._ctx)
        seconds = time.perf_counter() - start
        self.n_decodes += 1
        if code != 0:
            for r in rows:  # some codes leave the rows of finished sub-batches behind
                L.llama_memory_seq_rm(self._memory, r.seq, self._n_past[r.seq], -1)
            raise DecodeError(code, f"decoding {n_rows} rows of {len(rows)} sequences failed")
        for r in rows:
            self._n_past[r.seq] = r.pos + len(r.tokens)
        return Step(self._outputs(rows, n_rows, n_outputs), seconds)

    def rewind(self, seq: int, n_past: int) -> None:
        if n_past >= self._n_past[seq]:
            return  # seq_rm scans all cells, so it is not called for nothing
        if not L.llama_memory_seq_rm(self._memory, seq, n_past, -1):
            raise CannotRewind(
                f"the KV cache of this model cannot drop rows {n_past} to {self._n_past[seq] - 1}"
            )
        self._n_past[seq] = n_past

    def copy(self, src: int, dst: int, n_past: int) -> None:
        if src == dst:
            return
        self.rewind(dst, 0)
        L.llama_memory_seq_cp(self._memory, src, dst, 0, n_past)
        self._n_past[dst] = min(n_past, self._n_past[src])

    def save(self, seq: int) -> bytes:
        size = L.llama_state_seq_get_size(self._ctx, seq)
        buffer = (ctypes.c_uint8 * size)()
        written = L.llama_state_seq_get_data(self._ctx, buffer, size, seq)
        return self._n_past[seq].to_bytes(8, "little") + bytes(buffer[:written])

    def load(self, seq: int, data: bytes) -> int:
        self.rewind(seq, 0)
        state = data[8:]
        buffer = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        with _Errors() as errors:
            read = L.llama_state_seq_set_data(self._ctx, buffer, len(state), seq)
        if read == 0:
            L.llama_memory_seq_rm(self._memory, seq, -1, -1)
            raise SavedStateError(f"llama.cpp refused the saved sequence: {errors.reason()}")
        self._n_past[seq] = int.from_bytes(data[:8], "little")
        return self._n_past[seq]

    def close(self) -> None:
        if self._ctx:
            L.llama_free(self._ctx)
            self._ctx = None

    def _check(self, rows: Sequence[Rows]) -> None:
        """What llama.cpp would answer with an abort, or store wrongly, is refused here."""
        n_rows = sum(len(r.tokens) for r in rows)
        n_outputs = sum(r.n_outputs for r in rows)
        _refuse_unless(0 < n_rows <= self.options.n_batch, f"{n_rows} rows in a batch")
        _refuse_unless(n_outputs <= self.options.n_outputs, f"{n_outputs} rows with logits")
        _refuse_unless(len({r.seq for r in rows}) == len(rows), "a sequence came twice")
        for r in rows:
            _refuse_unless(0 <= r.seq < self.options.n_seq, f"sequence {r.seq}")
            past = self._n_past[r.seq]
            # An MTP sequence begins at position 1: its row p + 1 takes the target's hidden row p.
            begins = past == 0 and r.pos == 1 and self.options.is_mtp
            _refuse_unless(
                r.pos == past or begins,
                f"sequence {r.seq} ends at {past}, its rows begin at {r.pos}",
            )
            _refuse_unless((r.hidden is not None) == self.options.is_mtp, "hidden rows")

    def _outputs(self, rows: Sequence[Rows], n_rows: int, n_outputs: int) -> list[Output]:
        logits = _view(L.llama_get_logits(self._ctx), n_outputs, self._n_vocab)
        hidden = None
        if self._get_hidden is not None:
            hidden = _view(self._get_hidden(self._ctx), n_rows, self._n_embd)
        outputs, row, out = [], 0, 0
        for r in rows:
            n = len(r.tokens)
            h = None if hidden is None else hidden[row : row + n]
            outputs.append(Output(logits[out : out + r.n_outputs], h))
            row, out = row + n, out + r.n_outputs
        return outputs


def _refuse_unless(sound: bool, what: str) -> None:
    if not sound:
        raise DecodeError(REFUSED, f"a batch that llama.cpp must not see: {what}")


class _Batch:
    """The arrays of a llama_batch, owned by Python and filled by slices."""

    def __init__(self, n_batch: int, n_embd: int) -> None:
        self._token = np.zeros(n_batch, np.int32)
        self._pos = np.zeros(n_batch, np.int32)
        self._seq = np.zeros(n_batch, np.int32)
        self._output = np.zeros(n_batch, np.int8)
        self._hidden = np.zeros((n_batch, n_embd), np.float32) if n_embd else None
        self._one = np.ones(n_batch, np.int32)
        self._count = np.arange(n_batch, dtype=np.int32)
        # seq_id[i] points at element i of `_seq`: built once, the sequences change in place
        self._seq_ptr = self._seq.ctypes.data + 4 * np.arange(n_batch, dtype=np.uintp)
        struct = L.llama_batch()
        struct.token = _pointer(self._token, L.llama_token)
        struct.pos = _pointer(self._pos, L.llama_pos)
        struct.n_seq_id = _pointer(self._one, ctypes.c_int32)
        struct.seq_id = _pointer(self._seq_ptr, ctypes.POINTER(L.llama_seq_id))
        struct.logits = _pointer(self._output, ctypes.c_int8)
        if self._hidden is not None:
            struct.embd = _pointer(self._hidden, ctypes.c_float)
        self.struct = struct

    def fill(self, rows: Sequence[Rows]) -> tuple[int, int]:
        """Lays the rows out one after the other; returns how many rows and outputs there are."""
        i = n_outputs = 0
        for r in rows:
            j = i + len(r.tokens)
            self._token[i:j] = r.tokens
            self._pos[i:j] = self._count[: j - i]
            self._pos[i:j] += r.pos
            self._seq[i:j] = r.seq
            self._output[i:j] = 0
            self._output[j - r.n_outputs : j] = 1
            if self._hidden is not None:
                self._hidden[i:j] = r.hidden
            i, n_outputs = j, n_outputs + r.n_outputs
        self.struct.n_tokens = i
        return i, n_outputs


def _pointer(array: NDArray[Any], ctype: Any) -> Any:
    """A ctypes pointer to the array's first element; the array must outlive it."""
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(ctype))


def _new_context(model: Any, options: ContextOptions) -> Any:
    params = L.llama_context_default_params()
    params.n_ctx, params.n_seq_max = options.n_ctx, options.n_seq
    params.n_batch = params.n_ubatch = options.n_batch
    params.n_outputs_max = max(options.n_outputs, options.n_seq)  # fewer than n_seq_max aborts
    params.n_threads = params.n_threads_batch = options.n_threads
    params.kv_unified = True  # separate caches split an uneven batch into several full passes
    if options.is_mtp:
        params.ctx_type = L.LLAMA_CONTEXT_TYPE_MTP
    if options.strict:
        params.type_k = params.type_v = L.GGML_TYPE_F32
        params.flash_attn_type = L.LLAMA_FLASH_ATTN_TYPE_DISABLED
    with _Errors() as errors:
        ctx = L.llama_init_from_model(model, params)
    if not ctx:
        raise LoadFailed(f"no context of {options.n_ctx} cells: {errors.reason()}")
    return ctx


def _check_binding() -> None:
    """The binding's structs must lie as the library's do, or every option lands in the wrong
    place."""
    if L.__version__ != LLAMA_CPP_PYTHON:
        raise LoadFailed(
            f"llama-cpp-python {L.__version__} is installed, but this version of gguf-mtp "
            f"needs {LLAMA_CPP_PYTHON}"
        )
    model, context = L.llama_model_default_params(), L.llama_context_default_params()
    if model.load_mtp or context.ctx_type != L.LLAMA_CONTEXT_TYPE_DEFAULT:
        raise LoadFailed("llama-cpp-python's structs do not match its library; reinstall it")


def _nextn(name: str) -> Any:
    """One of the unstable C++ exports for hidden rows."""
    try:
        from llama_cpp import llama_cpp_ext

        return getattr(llama_cpp_ext, name)
    except (ImportError, AttributeError) as error:
        raise LoadFailed(
            f"this llama-cpp-python lacks {name}; drafting needs {LLAMA_CPP_PYTHON}"
        ) from error


def _view(pointer: Any, n_rows: int, n_columns: int) -> Floats:
    """float32 [n_rows, n_columns] over llama.cpp's memory, valid until the next decode."""
    if n_rows == 0:
        return np.empty((0, n_columns), np.float32)
    address = ctypes.cast(pointer, ctypes.c_void_p).value
    if not address:
        raise DecodeError(0, f"llama.cpp returned no buffer for {n_rows} output rows")
    block = (ctypes.c_float * (n_rows * n_columns)).from_address(address)
    return np.frombuffer(memoryview(block), np.float32).reshape(n_rows, n_columns)


def accelerators() -> list[str]:
    """Names of the devices besides the CPU that layers can lie on, as llama.cpp numbers them."""
    ggml = llama_cpp_ggml.libggml
    ggml.ggml_backend_dev_count.restype = ctypes.c_size_t
    ggml.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
    for name, result in (
        ("get", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("type", ctypes.c_int),
    ):
        getattr(ggml, f"ggml_backend_dev_{name}").restype = result
    for name in ("name", "type"):
        getattr(ggml, f"ggml_backend_dev_{name}").argtypes = [ctypes.c_void_p]
    L.llama_backend_init()
    devices = map(ggml.ggml_backend_dev_get, range(ggml.ggml_backend_dev_count()))
    gpu, integrated = 1, 2  # enum ggml_backend_dev_type
    return [
        ggml.ggml_backend_dev_name(device).decode(errors="replace")
        for device in devices
        if ggml.ggml_backend_dev_type(device) in (gpu, integrated)
    ]
