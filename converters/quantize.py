"""Rows of float32 -> bytes of any ggml type, in threads, in order, in bounded memory.

Each worker takes one chunk through all steps (read, dequantise, quantise), so that chunks overlap
and every core is busy; ctypes, numpy and `preadv` let go of the interpreter lock. There are a few
more buffers than threads and no others, which bounds the memory whatever the tensor. The kernels
are ggml's own, from the llama-cpp-python package, called without importing it.

It knows nothing of files and recipes.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
import os
import queue
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gguf import GGMLQuantizationType

from ..errors import ConversionError
from ..types import Floats
from .checkpoint import FP4
from .gguf_file import TypedTensor, row_bytes
from .row_reader import Bytes, RowReader
from .tensors import SourceRows

# Buffers beyond one per thread: chunks that wait for their turn to be written.
N_SPARE = 4
# Weights per chunk: large against Python's 50 us per chunk, small enough for a core's cache.
CHUNK = 1 << 19
_LIBRARY = {"darwin": "libggml-base.dylib", "win32": "ggml-base.dll"}.get(
    sys.platform, "libggml-base.so"
)


class Ggml:
    """ggml's quantisation routines. Raises `ConversionError` when the library is not there."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec("llama_cpp")
        if spec is None or spec.origin is None:
            raise ConversionError("quantising needs llama-cpp-python, which is not installed")
        path = Path(spec.origin).parent / "lib" / _LIBRARY
        try:
            library = ctypes.CDLL(os.fspath(path))
        except OSError as error:
            raise ConversionError(f"cannot load {path}: {error}") from None
        self._quantize = library.ggml_quantize_chunk
        self._quantize.restype = ctypes.c_size_t
        self._quantize.argtypes = [
            ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p,
            ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p,
        ]  # fmt: skip

    def quantize(
        self, type_: GGMLQuantizationType, rows: Floats, out: Bytes, importance: Floats | None
    ) -> None:
        """Rows, float32 [n, n_per_row], into `out`; `importance` is float32 [n_per_row] or None."""
        n, n_per_row = rows.shape
        assert out.nbytes == n * row_bytes(type_, n_per_row)
        weights = None if importance is None else importance.ctypes.data
        self._quantize(type_, rows.ctypes.data, out.ctypes.data, 0, n, n_per_row, weights)


class ChunkPart(NamedTuple):
    """Rows of one output matrix (one expert, one head) in a chunk; of several pieces, which are as
    high, those side by side."""

    pieces: tuple[SourceRows, ...]
    matrix: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.pieces[0].shape[0], sum(piece.shape[1] for piece in self.pieces)

    @property
    def n_weights(self) -> int:
        return math.prod(self.shape)


class Task(NamedTuple):
    """One chunk of one tensor. `importance`, float32 [matrices, n_per_row], weighs its columns."""

    placed: TypedTensor
    parts: tuple[ChunkPart, ...]
    importance: Floats | None
    is_last: bool


def tasks(placed: TypedTensor, importance: Floats | None) -> Iterator[Task]:
    """Cut a tensor into chunks of at most `CHUNK` weights (or one row, or one transposed piece)."""
    parts: list[ChunkPart] = []
    n = 0
    for part in _parts(placed):
        size = part.n_weights
        if parts and n + size > CHUNK:
            yield Task(placed, tuple(parts), importance, False)
            parts, n = [], 0
        parts.append(part)
        n += size
    yield Task(placed, tuple(parts), importance, True)


def _parts(placed: TypedTensor) -> Iterator[ChunkPart]:
    tensor = placed.tensor
    rows_per_matrix = tensor.shape[-2] if len(tensor.shape) > 1 else 1
    if tensor.beside:
        step = max(1, CHUNK // tensor.n_per_row)
        for row in range(0, tensor.n_rows, step):
            n_rows = min(step, tensor.n_rows - row)
            yield ChunkPart(tuple(p._replace(row=row, n_rows=n_rows) for p in tensor.pieces), 0)
        return
    done = 0
    for piece in tensor.pieces:
        n_rows = piece.shape[0]
        if piece.transposed:
            yield ChunkPart((piece,), done // rows_per_matrix)
        else:
            step = max(1, CHUNK // piece.weight.tensor.n_cols)
            for row in range(0, n_rows, step):
                cut = piece._replace(row=piece.row + row, n_rows=min(step, n_rows - row))
                yield ChunkPart((cut,), (done + row) // rows_per_matrix)
        done += n_rows


class _Buffers:
    """One chunk's scratch: source bytes, float32 rows, and the bytes to write."""

    def __init__(self) -> None:
        self.raw = np.empty(0, np.uint8)
        self.rows = np.empty(0, np.float32)
        self.out = np.empty(0, np.uint8)

    def fit(self, n_weights: int) -> None:
        if self.rows.size < n_weights:
            self.raw = np.empty(4 * n_weights, np.uint8)
            self.rows = np.empty(n_weights, np.float32)
            self.out = np.empty(4 * n_weights, np.uint8)


class Encoder:
    """Runs tasks on `n_threads` threads."""

    def __init__(self, reader: RowReader, ggml: Ggml, n_threads: int) -> None:
        self._reader, self._ggml, self._n_threads = reader, ggml, n_threads
        self._free: queue.SimpleQueue[_Buffers] = queue.SimpleQueue()
        self._n_buffers = n_threads + N_SPARE
        for _ in range(self._n_buffers):
            self._free.put(_Buffers())

    def stream(self, todo: Iterable[Task]) -> Iterator[tuple[Task, Bytes]]:
        """Each task with its bytes, in order; the bytes are valid until the next one is asked for.

        Raises `ConversionError` when a source cannot be read or holds a NaN.
        """
        waiting: deque[tuple[Task, Future[tuple[_Buffers, Bytes]]]] = deque()
        pool = ThreadPoolExecutor(self._n_threads, thread_name_prefix="quantise")
        try:
            for task in todo:
                if len(waiting) == self._n_buffers - 1:
                    yield from self._next(waiting)
                waiting.append((task, pool.submit(self._run, task)))
            while waiting:
                yield from self._next(waiting)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _next(
        self, waiting: deque[tuple[Task, Future[tuple[_Buffers, Bytes]]]]
    ) -> Iterator[tuple[Task, Bytes]]:
        task, future = waiting.popleft()
        buffers, out = future.result()
        yield task, out
        self._free.put(buffers)

    def _run(self, task: Task) -> tuple[_Buffers, Bytes]:
        buffers = self._free.get()
        sizes = [part.n_weights for part in task.parts]
        buffers.fit(sum(sizes))
        type_ = task.placed.type
        done_rows = done_bytes = 0
        for part, size in zip(task.parts, sizes, strict=True):
            n_rows, n_cols = part.shape
            n_bytes = n_rows * row_bytes(type_, n_cols)
            out = buffers.out[done_bytes : done_bytes + n_bytes]
            if type_ is GGMLQuantizationType.MXFP4 and part.pieces[0].weight.tensor.dtype == FP4:
                out[:] = self._reader.mxfp4(part.pieces[0]).ravel()
            else:
                rows: Floats = buffers.rows[done_rows : done_rows + size].reshape(part.shape)
                self._read(part, buffers.raw, rows)
                self._encode(task, part, rows, out)
            done_rows, done_bytes = done_rows + size, done_bytes + n_bytes
        return buffers, buffers.out[:done_bytes]

    def _read(self, part: ChunkPart, raw: Bytes, rows: Floats) -> None:
        if len(part.pieces) == 1:
            self._reader.read(part.pieces[0], raw, rows)
            return
        done = 0
        for piece in part.pieces:
            own = np.empty(piece.shape, np.float32)
            self._reader.read(piece, raw, own)
            rows[:, done : done + own.shape[1]] = own
            done += own.shape[1]

    def _encode(self, task: Task, part: ChunkPart, rows: Floats, out: Bytes) -> None:
        if task.placed.type is GGMLQuantizationType.I32:
            out.view(np.int32)[:] = rows.ravel()
            return
        importance = None if task.importance is None else task.importance[part.matrix]
        self._ggml.quantize(task.placed.type, rows, out, importance)
