"""The arrays of a llama_batch, owned by Python. It knows neither models nor contexts."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import llama_cpp as L
import numpy as np
from numpy.typing import NDArray

from gguf_mtp.types import Rows

_FEW = 8  # tokens that are sooner written one by one than as a slice


class BatchArrays:
    """The arrays of a llama_batch, owned by Python: filled by slices, and for the few tokens of a
    round through views whose items are set without numpy."""

    def __init__(self, n_batch: int, n_embd: int, has_tokens: bool = True) -> None:
        """`n_embd`: the width of the hidden rows that go in, 0 without any; alone where the batch
        must not have tokens."""
        self._token = np.zeros(n_batch, np.int32)
        self._pos = np.zeros(n_batch, np.int32)
        self._seq = np.zeros(n_batch, np.int32)
        self._output = np.zeros(n_batch, np.int8)
        self._items = self._token.data, self._pos.data, self._seq.data, self._output.data
        self._hidden = np.zeros((n_batch, n_embd), np.float32) if n_embd else None
        self._one = np.ones(n_batch, np.int32)
        self._count = np.arange(n_batch, dtype=np.int32)
        # seq_id[i] points at element i of `_seq`: built once, the sequences change in place
        self._seq_ptr = self._seq.ctypes.data + 4 * np.arange(n_batch, dtype=np.uintp)
        struct = L.llama_batch()
        if has_tokens:
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
            if j - i <= _FEW:
                self._set_items(i, r)
            else:
                self._set_slices(i, j, r)
            if self._hidden is not None:
                self._hidden[i:j] = r.hidden
            i, n_outputs = j, n_outputs + r.n_outputs
        self.struct.n_tokens = i
        return i, n_outputs

    def _set_items(self, i: int, r: Rows) -> None:
        tokens, positions, seqs, outputs = self._items
        first_output = r.pos + len(r.tokens) - r.n_outputs
        for pos, token in enumerate(r.tokens, r.pos):
            tokens[i], positions[i], seqs[i], outputs[i] = token, pos, r.seq, pos >= first_output
            i += 1

    def _set_slices(self, i: int, j: int, r: Rows) -> None:
        self._token[i:j] = r.tokens
        self._pos[i:j] = self._count[: j - i]
        self._pos[i:j] += r.pos
        self._seq[i:j] = r.seq
        self._output[i:j] = 0
        self._output[j - r.n_outputs : j] = 1


def _pointer(array: NDArray[Any], ctype: Any) -> Any:
    """A ctypes pointer to the array's first element; the array must outlive it."""
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(ctype))
