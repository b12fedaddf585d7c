"""Rows of a checkpoint's weights as float32: BF16, F16, F32, FP8 and FP4 with their block scales.

FP8 e4m3 goes through a table of all pairs of bytes (512 KiB, so it stays in a core's cache), then
each band of block rows is multiplied by its scales; edge blocks are partial. Memory is the
caller's: rows land in an array it hands in.
"""

from __future__ import annotations

from functools import cache
from typing import cast

import numpy as np
from numpy.typing import NDArray

from ..errors import ConversionError
from ..types import Floats
from .checkpoint import FP4, ITEM_SIZE, Checkpoint, SourceTensor, n_bytes_of
from .tensors import SourceRows, Weight

Bytes = NDArray[np.uint8]

_E4M3_NAN = 0x7F  # without its sign
_E4M3_MAX = 448.0
_E8M0_NAN = 255


def e4m3_table() -> Floats:
    """float32 [256]: the value of every FP8 e4m3 byte (1-4-3, bias 7, no infinity, 0x7f is NaN).

    Micikevicius et al. 2022, "FP8 Formats for Deep Learning", arXiv 2209.05433, table 1.
    """
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    value[code & 127 == 127] = np.nan
    return np.where(code & 128, -value, value).astype(np.float32)


@cache
def e8m0_table() -> Floats:
    """Of each code its power of two, 2^(code - 127); 255 is NaN (OCP MX 1.0, section 5.4.1)."""
    exponents = np.arange(256) - 127
    table: Floats = np.ldexp(np.float64(1), exponents).astype(np.float32)
    table[255] = np.nan
    return table


def e2m1_values() -> Floats:
    """float32 [16]: the value of every FP4 code, sign first (OCP MX 1.0, section 5.3.3)."""
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    return np.concatenate((values, -values))


def as_mxfp4(codes: Bytes, scales: Bytes) -> Bytes:
    """ggml's blocks, uint8 [rows, 17 * columns / 32], of FP4 codes, two in a byte, uint8
    [rows, columns / 2], and their E8M0 scales, uint8 [rows, columns / 32].

    The values stay what they are: only the order of the codes differs. A byte of a block holds code
    j and code j + 16 (`block_mxfp4` in ggml-common.h).
    """
    n_rows, n_blocks = scales.shape
    pairs = codes.reshape(n_rows, n_blocks, 16)
    each = np.stack((pairs & 15, pairs >> 4), axis=-1).reshape(n_rows, n_blocks, 32)
    blocks = np.empty((n_rows, n_blocks, 17), np.uint8)
    blocks[..., 0] = scales
    np.bitwise_or(each[..., :16], each[..., 16:] << 4, out=blocks[..., 1:])
    return blocks.reshape(n_rows, -1)


class Dequantiser:
    """Bytes of any dtype that a weight may have -> float32, without FP8's scales."""

    def __init__(self) -> None:
        self._table = e4m3_table()
        code = np.arange(1 << 16)
        pairs = np.stack((self._table[code & 255], self._table[code >> 8]), axis=1)
        self._pairs = np.ascontiguousarray(pairs).view(np.uint64).ravel()
        code, values = np.arange(256), e2m1_values()
        both = np.stack((values[code & 15], values[code >> 4]), axis=1)
        self._fp4 = np.ascontiguousarray(both).view(np.uint64).ravel()

    def to_float(self, dtype: str, raw: Bytes, out: Floats) -> None:
        """`raw` holds exactly the weights of `out`, float32 [rows, columns]."""
        match dtype:
            case "F32":
                out[...] = raw.view(np.float32).reshape(out.shape)
            case "F16":
                out[...] = raw.view(np.float16).reshape(out.shape)
            case "BF16":
                bits = raw.view(np.uint16).reshape(out.shape)
                np.left_shift(bits, 16, out=out.view(np.uint32), dtype=np.uint32)
            case "I32" | "I64":  # fewer than float32 counts exactly
                out[...] = raw.view(np.int32 if dtype == "I32" else np.int64).reshape(out.shape)
            case "F4":
                flat = cast("NDArray[np.uint64]", out.reshape(-1).view(np.uint64))
                np.take(self._fp4, raw, out=flat, mode="clip")
            case _ if out.size % 2:
                np.take(self._table, raw.reshape(out.shape), out=out, mode="clip")
            case _:
                flat = cast("NDArray[np.uint64]", out.reshape(-1).view(np.uint64))
                np.take(self._pairs, raw.view(np.uint16), out=flat, mode="clip")


class RowReader:
    """Reads pieces of one checkpoint. Safe in several threads, each with its own buffers."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._dequantiser = Dequantiser()

    def read(self, piece: SourceRows, raw: Bytes, out: Floats) -> None:
        """Put the piece, float32 [rows, columns] as it stands in the output, into `out`.

        `raw` is scratch of at least the piece's source bytes. Raises `OSError`, and
        `ConversionError` for NaN and infinity: most quantised types would hide them.
        """
        rows = np.empty(out.shape[::-1], np.float32) if piece.transposed else out
        with np.errstate(all="ignore"):
            is_finite = self._rows(piece.weight, piece.row, raw, rows)
        if not is_finite:
            raise ConversionError(f"{piece.weight.tensor.name} holds a NaN or an infinity")
        if piece.transposed:
            out[...] = rows.T

    def mxfp4(self, piece: SourceRows) -> Bytes:
        """The piece, which is FP4, in ggml's blocks. Raises as `read`."""
        weight, n_rows = piece.weight, piece.n_rows
        assert weight.scale is not None
        codes = np.empty((n_rows, weight.tensor.n_cols // 2), np.uint8)
        scales = np.empty((n_rows, weight.scale.n_cols), np.uint8)
        self._checkpoint.read_into(weight.tensor, piece.row * codes.shape[1], codes.ravel().data)
        self._checkpoint.read_into(weight.scale, piece.row * scales.shape[1], scales.ravel().data)
        if scales.max() == _E8M0_NAN:
            raise ConversionError(f"{weight.scale.name} holds a NaN")
        return as_mxfp4(codes, scales)

    def _rows(self, weight: Weight, row: int, raw: Bytes, out: Floats) -> bool:
        """Whether all of them are finite; `raw` is used up."""
        tensor = weight.tensor
        n_bytes = n_bytes_of(tensor.dtype, out.size)
        raw = raw[:n_bytes] if len(raw) >= n_bytes else np.empty(n_bytes, np.uint8)  # of I64
        begin = n_bytes_of(tensor.dtype, row * tensor.n_cols)
        self._checkpoint.read_into(tensor, begin, raw.data)
        self._dequantiser.to_float(tensor.dtype, raw, out)
        if weight.scale is None:
            # A finite sum proves finite terms at the cost of one pass without a temporary.
            return bool(np.isfinite(out.sum()) or np.isfinite(out).all())
        if tensor.dtype == FP4:
            return self._scale(weight.scale, weight.block, row, out)
        # One pass over the bytes is a quarter of one over the floats.
        has_nan = np.bitwise_and(raw, _E4M3_NAN, out=raw).max() == _E4M3_NAN
        return self._scale(weight.scale, weight.block, row, out) and not has_nan

    def _scale(self, scale: SourceTensor, block: tuple[int, int], row: int, out: Floats) -> bool:
        """Whether no weight can become infinite by its scale."""
        n_rows, n_cols = block
        first, last = row // n_rows, (row + len(out) - 1) // n_rows
        item = ITEM_SIZE[scale.dtype]
        raw = np.empty((last - first + 1, scale.n_cols * item), np.uint8)
        self._checkpoint.read_into(scale, first * raw.shape[1], raw.ravel().data)
        scales = raw.view(np.float32) if item == 4 else e8m0_table()[raw]
        if n_rows == 1:  # a scale for some values of each row
            out.reshape(len(out), -1, n_cols)[...] *= scales[:, :, None]
            return bool(np.isfinite(out.sum()) or np.isfinite(out).all())
        for band, values in enumerate(scales, first):
            begin, end = max(band * n_rows - row, 0), (band + 1) * n_rows - row
            out[begin:end] *= np.repeat(values, n_cols)[: out.shape[1]]
        return bool(np.isfinite(scales * np.float32(_E4M3_MAX)).all())
