"""Arrays over memory that llama.cpp owns."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from gguf_mtp.errors import DecodeError
from gguf_mtp.types import Floats


class OutputBuffer:
    """Rows of floats that a context puts out, mostly in the same place after every decode: the
    array over it is made once, as ctypes takes longer for one than a small model for a layer."""

    def __init__(self, n_columns: int) -> None:
        self._rows: Floats = np.empty((0, n_columns), np.float32)
        self._address = 0

    def rows(self, pointer: Any, n_rows: int) -> Floats:
        """float32 [n_rows, n_columns] at `pointer`, valid until the next decode. Raises
        `DecodeError` where there should be rows and is no buffer."""
        if n_rows == 0:
            return self._rows[:0]
        if not pointer:
            raise DecodeError(0, f"llama.cpp returned no buffer for {n_rows} output rows")
        address = ctypes.addressof(pointer.contents)
        if address != self._address or n_rows > len(self._rows):
            n_columns = self._rows.shape[1]
            block = (ctypes.c_float * (n_rows * n_columns)).from_address(address)
            self._rows = np.frombuffer(memoryview(block), np.float32).reshape(n_rows, n_columns)
            self._address = address
        return self._rows[:n_rows]
