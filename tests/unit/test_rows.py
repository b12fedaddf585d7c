"""FP8 with its block scales, BF16, F16 and F32 as float32 rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gguf_mtp.converters.checkpoint import Checkpoint
from gguf_mtp.converters.row_reader import RowReader, e4m3_table
from gguf_mtp.converters.tensors import SourceRows, Weight
from gguf_mtp.errors import ConversionError
from tests.support.checkpoints import Entry, write


@pytest.mark.parametrize(
    ("byte", "value"),
    [(0x00, 0.0), (0x01, 2**-9), (0x07, 7 * 2**-9), (0x08, 2**-6), (0x38, 1.0), (0x3C, 1.5),
     (0x40, 2.0), (0x77, 240.0), (0x7E, 448.0), (0xB8, -1.0), (0xFE, -448.0)],
)  # fmt: skip
def test_e4m3_values(byte: int, value: float) -> None:
    assert e4m3_table()[byte] == value


def test_e4m3_order_and_nan() -> None:
    table = e4m3_table()
    assert (np.diff(table[:0x7F]) > 0).all()
    assert np.signbit(table[0x80])
    assert np.flatnonzero(np.isnan(table)).tolist() == [0x7F, 0xFF]


FP8 = Entry("w", "F8_E4M3", (300, 200))  # blocks of 128: rows end in 44, columns in 72
SCALE = Entry("w_scale_inv", "F32", (3, 2))


def fp8_bytes(entry: Entry) -> bytes:
    rng = np.random.default_rng(1)
    if entry is SCALE:
        return rng.random(6, dtype=np.float32).tobytes()
    codes = rng.integers(0, 256, entry.n_bytes, dtype=np.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    return codes.tobytes()


@pytest.mark.parametrize(
    ("row", "n_rows", "transposed"),
    [(0, 300, False), (0, 1, False), (127, 2, False), (130, 100, False), (255, 45, False),
     (64, 128, True), (299, 1, True)],
)  # fmt: skip
def test_fp8_rows(tmp_path: Path, row: int, n_rows: int, transposed: bool) -> None:
    """Any rows of a matrix whose last blocks are partial equal the whole one, computed plainly."""
    scales = np.frombuffer(fp8_bytes(SCALE), np.float32).reshape(SCALE.shape)
    codes = np.frombuffer(fp8_bytes(FP8), np.uint8).reshape(FP8.shape)
    each = np.array([[scales[i // 128, j // 128] for j in range(200)] for i in range(300)])
    whole = e4m3_table()[codes] * each
    folder = write(tmp_path / "c", {}, [FP8, SCALE], fp8_bytes)
    with Checkpoint(folder) as checkpoint:
        weight = Weight(checkpoint.tensors["w"], checkpoint.tensors["w_scale_inv"], (128, 128))
        piece = SourceRows(weight, row, n_rows, transposed)
        out = np.empty(piece.shape, np.float32)
        RowReader(checkpoint).read(piece, np.empty(1 << 17, np.uint8), out)
    wanted = whole[row : row + n_rows]
    np.testing.assert_array_equal(out, wanted.T if transposed else wanted)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_float_rows(tmp_path: Path, dtype: str) -> None:
    values = np.array([[1.5, -2.0, 0.0], [2.0**-14, 448.0, -0.5]], np.float32)
    raw = {
        "F32": values.tobytes(),
        "F16": values.astype(np.float16).tobytes(),
        "BF16": (values.view(np.uint32) >> 16).astype(np.uint16).tobytes(),
    }[dtype]
    folder = write(tmp_path / "c", {}, [Entry("w", dtype, (2, 3))], lambda _: raw)
    with Checkpoint(folder) as checkpoint:
        out = np.empty((1, 3), np.float32)
        piece = SourceRows(Weight(checkpoint.tensors["w"]), 1, 1)
        RowReader(checkpoint).read(piece, np.empty(64, np.uint8), out)
    np.testing.assert_array_equal(out, values[1:])


def test_odd_fp8_row(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", {}, [Entry("w", "F8_E4M3", (1, 3))], lambda _: b"\x38\x40\xb8")
    with Checkpoint(folder) as checkpoint:
        out = np.empty((1, 3), np.float32)
        piece = SourceRows(Weight(checkpoint.tensors["w"]), 0, 1)
        RowReader(checkpoint).read(piece, np.empty(64, np.uint8), out)
    assert out.tolist() == [[1, 2, -1]]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_is_an_error(tmp_path: Path, value: float) -> None:
    raw = np.array([1, value, -value, 2], np.float32).tobytes()
    folder = write(tmp_path / "c", {}, [Entry("w", "F32", (4,))], lambda _: raw)
    with Checkpoint(folder) as checkpoint:
        piece = SourceRows(Weight(checkpoint.tensors["w"]), 0, 1)
        with pytest.raises(ConversionError, match="w holds a NaN or an infinity"):
            RowReader(checkpoint).read(piece, np.empty(64, np.uint8), np.empty((1, 4), np.float32))


@pytest.mark.parametrize("dtype", ["F8_E8M0", "U8"])
def test_scales_that_are_powers_of_two(tmp_path: Path, dtype: str) -> None:
    """The same numbers as from F32 scales of the same values."""
    codes = np.array([[0, 127, 230], [120, 130, 1]], np.uint8)
    weight = np.arange(200 * 300, dtype=np.uint32) % 127  # all but NaN and the negative
    rows = []
    for type_, scale in ((dtype, codes), ("F32", np.ldexp(np.float32(1), codes.astype(int) - 127))):
        data = {"w": weight.astype(np.uint8).tobytes(), "w_scale_inv": scale.tobytes()}
        entries = [Entry("w", "F8_E4M3", (200, 300)), Entry("w_scale_inv", type_, (2, 3))]
        folder = write(tmp_path / type_, {}, entries, lambda entry, data=data: data[entry.name])
        with Checkpoint(folder) as checkpoint:
            source = Weight(checkpoint.tensors["w"], checkpoint.tensors["w_scale_inv"], (128, 128))
            out = np.empty((130, 300), np.float32)
            raw = np.empty(1 << 17, np.uint8)
            RowReader(checkpoint).read(SourceRows(source, 60, 130), raw, out)
            rows.append(out)
    np.testing.assert_array_equal(*rows)


@pytest.mark.parametrize(
    ("code", "scale", "is_finite"),
    [(0x7E, 1.0, True), (0x7F, 1.0, False), (0xFF, 1.0, False), (0x38, np.nan, False),
     (0x38, np.inf, False), (0x38, -np.inf, False), (0x7E, 1e36, False), (0x7E, 7e35, True)],
)  # fmt: skip
def test_fp8_that_is_not_finite(tmp_path: Path, code: int, scale: float, is_finite: bool) -> None:
    entries = [Entry("w", "F8_E4M3", (2, 4)), Entry("w_scale_inv", "F32", (1, 1))]
    data = {"w": bytes([0x38] * 7 + [code]), "w_scale_inv": np.float32(scale).tobytes()}
    folder = write(tmp_path / "c", {}, entries, lambda entry: data[entry.name])
    with Checkpoint(folder) as checkpoint:
        weight = Weight(checkpoint.tensors["w"], checkpoint.tensors["w_scale_inv"], (128, 128))
        out = np.empty((2, 4), np.float32)
        reader, piece, raw = RowReader(checkpoint), SourceRows(weight, 0, 2), np.empty(64, np.uint8)
        if is_finite:
            reader.read(piece, raw, out)
            assert out[1, 3] == np.float32(448) * np.float32(scale)
        else:
            with pytest.raises(ConversionError, match="w holds a NaN or an infinity"):
                reader.read(piece, raw, out)


def test_sum_that_overflows_is_no_error(tmp_path: Path) -> None:
    raw = np.full(4, 3e38, np.float32).tobytes()
    folder = write(tmp_path / "c", {}, [Entry("w", "F32", (4,))], lambda _: raw)
    with Checkpoint(folder) as checkpoint:
        out = np.empty((1, 4), np.float32)
        RowReader(checkpoint).read(
            SourceRows(Weight(checkpoint.tensors["w"]), 0, 1), np.empty(64, np.uint8), out
        )
    assert (out == np.float32(3e38)).all()
