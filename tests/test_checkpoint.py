"""Shards on disk, and what the pre-pass says of bad ones; FP8 and the other dtypes as float32."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from checkpoints import INDEX, Entry, write, write_shard

from gguf_mtp.converters.checkpoint import Checkpoint
from gguf_mtp.converters.plan import Piece, Weight
from gguf_mtp.converters.rows import RowReader, e4m3_table
from gguf_mtp.errors import ConversionError

A, B = Entry("a", "F32", (3, 4)), Entry("b", "BF16", (5,))
SHARDS = [f"model-0000{i}-of-000002.safetensors" for i in (1, 2)]


def data(entry: Entry) -> bytes:
    rng = np.random.default_rng(len(entry.name) + entry.n_bytes)
    return rng.integers(0, 120, entry.n_bytes, dtype=np.uint8).tobytes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "checkpoint", {}, [A, B], data, n_shards=2)


def read(checkpoint: Checkpoint, name: str, offset: int = 0) -> bytes:
    tensor = checkpoint.tensors[name]
    buffer = bytearray(tensor.n_bytes - offset)
    checkpoint.read_into(tensor, offset, memoryview(buffer))
    return bytes(buffer)


def test_lists_and_reads_tensors(folder: Path) -> None:
    with Checkpoint(folder) as checkpoint:
        assert list(checkpoint.tensors) == ["a", "b"]
        assert checkpoint.tensors["a"][:3] == ("a", "F32", (3, 4))
        assert checkpoint.tensors["b"].file == SHARDS[1]
        assert (checkpoint.n_files, checkpoint.n_bytes) == (2, 58)
        assert read(checkpoint, "a") == data(A)
        assert read(checkpoint, "b", offset=4) == data(B)[4:]


def test_one_file_without_index(folder: Path) -> None:
    (folder / INDEX).unlink()
    write_shard(folder / "model.safetensors", [A], data)
    with Checkpoint(folder) as checkpoint:
        assert read(checkpoint, "a") == data(A)


def test_fingerprint_follows_size_and_time(folder: Path) -> None:
    def fingerprint() -> str:
        with Checkpoint(folder) as checkpoint:
            return checkpoint.fingerprint

    first = fingerprint()
    assert fingerprint() == first
    shard = folder / SHARDS[0]
    shard.write_bytes(shard.read_bytes())
    assert fingerprint() != first


def header(path: Path, change: Callable[[dict[str, dict[str, object]]], object]) -> None:
    """Change a shard's header and keep its data."""
    raw = path.read_bytes()
    (n,) = struct.unpack("<Q", raw[:8])
    entries = json.loads(raw[8 : 8 + n])
    change(entries)
    new = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(new)) + new + raw[8 + n :])


def cut(folder: Path) -> None:
    path = folder / SHARDS[1]
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def index(folder: Path, **weight_map: str) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


DAMAGE: list[tuple[str, Callable[[Path], object], str]] = [
    ("missing shard", lambda f: (f / SHARDS[1]).unlink(), f"{SHARDS[1]} is missing (1 shards of 2"),
    ("cut short", cut, f"{SHARDS[1]} is cut short: "),
    (
        "too long",
        lambda f: lengthen(f / SHARDS[0]),
        f"{SHARDS[0]} is longer than its header says: ",
    ),
    (
        "git lfs",
        lambda f: (f / SHARDS[0]).write_text("version https://git-lfs.github.com/spec/v1\noid 1"),
        f"{SHARDS[0]} is a Git LFS pointer",
    ),
    ("empty", lambda f: (f / SHARDS[0]).write_bytes(b""), "it has 0 bytes"),
    ("noise", lambda f: (f / SHARDS[0]).write_bytes(b"\xff" * 99), "its header would have"),
    (
        "cut header",
        lambda f: (f / SHARDS[0]).write_bytes(struct.pack("<Q", 500) + b"{"),
        "is cut short inside its header (9 of 508 bytes)",
    ),
    (
        "no json",
        lambda f: (f / SHARDS[0]).write_bytes(struct.pack("<Q", 4) + b"nope"),
        f"{SHARDS[0]} has a safetensors header that cannot be read",
    ),
    (
        "no offsets",
        lambda f: header(f / SHARDS[0], lambda h: h["a"].pop("data_offsets")),
        "header that cannot be read",
    ),
    (
        "unknown dtype",
        lambda f: header(f / SHARDS[0], lambda h: h["a"].update(dtype="F4")),
        "a has the unknown dtype F4",
    ),
    (
        "shape and bytes",
        lambda f: header(f / SHARDS[0], lambda h: h["a"].update(shape=[3, 5])),
        "a is F32 [3, 5] but has 48 bytes",
    ),
    (
        "negative extent",
        lambda f: header(f / SHARDS[0], lambda h: h["a"].update(shape=[-3, -4])),
        "a is F32 [-3, -4] but has 48 bytes",
    ),
    (
        "gap",
        lambda f: header(f / SHARDS[0], lambda h: h["a"].update(data_offsets=[4, 52])),
        "a does not begin where the tensor before ends",
    ),
    (
        "index names what is not there",
        lambda f: index(f, a=SHARDS[0], b=SHARDS[1], c=SHARDS[1]),
        f"{SHARDS[1]} does not hold c",
    ),
    (
        "index swaps files",
        lambda f: index(f, a=SHARDS[1], b=SHARDS[0]),
        f"{SHARDS[1]} does not hold a",
    ),
    (
        "twice",
        lambda f: write_shard(f / SHARDS[1], [B, A], data),
        f"a is in both {SHARDS[0]} and {SHARDS[1]}",
    ),
    ("path in index", lambda f: index(f, a="../x.safetensors"), "'../x.safetensors'"),
    ("empty index", lambda f: index(f), f"{INDEX} has no weight_map"),
    ("index is no json", lambda f: (f / INDEX).write_text("{"), f"{INDEX} is not JSON"),
    ("no index", lambda f: (f / INDEX).unlink(), f"holds neither {INDEX} nor model.safetensors"),
    ("no config", lambda f: (f / "config.json").unlink(), "config.json is missing"),
    ("config is a list", lambda f: (f / "config.json").write_text("[]"), "holds no JSON object"),
]


@pytest.mark.parametrize(("damage", "says"), [d[1:] for d in DAMAGE], ids=[d[0] for d in DAMAGE])
def test_says_what_is_wrong(folder: Path, damage: Callable[[Path], object], says: str) -> None:
    damage(folder)
    with pytest.raises(ConversionError) as error:
        Checkpoint(folder)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="nowhere is not a folder"):
        Checkpoint(tmp_path / "nowhere")


def test_file_that_shrinks_while_read(folder: Path) -> None:
    with Checkpoint(folder) as checkpoint:
        cut(folder)
        with pytest.raises(OSError, match="became shorter") as error:
            read(checkpoint, "b")
        assert error.value.filename == str(folder / SHARDS[1])


# -- rows ------------------------------------------------------------------------------------------


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
        piece = Piece(weight, row, n_rows, transposed)
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
        piece = Piece(Weight(checkpoint.tensors["w"]), 1, 1)
        RowReader(checkpoint).read(piece, np.empty(64, np.uint8), out)
    np.testing.assert_array_equal(out, values[1:])


def test_odd_fp8_row(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", {}, [Entry("w", "F8_E4M3", (1, 3))], lambda _: b"\x38\x40\xb8")
    with Checkpoint(folder) as checkpoint:
        out = np.empty((1, 3), np.float32)
        piece = Piece(Weight(checkpoint.tensors["w"]), 0, 1)
        RowReader(checkpoint).read(piece, np.empty(64, np.uint8), out)
    assert out.tolist() == [[1, 2, -1]]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_is_an_error(tmp_path: Path, value: float) -> None:
    raw = np.array([1, value, -value, 2], np.float32).tobytes()
    folder = write(tmp_path / "c", {}, [Entry("w", "F32", (4,))], lambda _: raw)
    with Checkpoint(folder) as checkpoint:
        piece = Piece(Weight(checkpoint.tensors["w"]), 0, 1)
        with pytest.raises(ConversionError, match="w holds a NaN or an infinity"):
            RowReader(checkpoint).read(piece, np.empty(64, np.uint8), np.empty((1, 4), np.float32))


def test_sum_that_overflows_is_no_error(tmp_path: Path) -> None:
    raw = np.full(4, 3e38, np.float32).tobytes()
    folder = write(tmp_path / "c", {}, [Entry("w", "F32", (4,))], lambda _: raw)
    with Checkpoint(folder) as checkpoint:
        out = np.empty((1, 4), np.float32)
        RowReader(checkpoint).read(
            Piece(Weight(checkpoint.tensors["w"]), 0, 1), np.empty(64, np.uint8), out
        )
    assert (out == np.float32(3e38)).all()
