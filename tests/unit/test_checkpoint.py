"""Shards on disk, and what the pre-pass says of bad ones."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gguf_mtp.converters.checkpoint import Checkpoint
from gguf_mtp.errors import ConversionError
from tests.support.checkpoints import INDEX, Entry, write, write_shard

A, B = Entry("a", "F32", (3, 4)), Entry("b", "BF16", (5,))
SHARDS = [f"model-0000{i}-of-000002.safetensors" for i in (1, 2)]


def data(entry: Entry) -> bytes:
    rng = np.random.default_rng(len(entry.name) + entry.n_bytes)
    return rng.integers(0, 120, entry.n_bytes, dtype=np.uint8).tobytes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "checkpoint", {}, [A, B], data, n_shards=2)


def holds_only(folder: Path, name: str) -> None:
    for file in (*SHARDS, INDEX):
        (folder / file).unlink()
    (folder / name).touch()


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
    ("missing shard", lambda f: (f / SHARDS[1]).unlink(), f"{SHARDS[1]} is missing (1 of 2 shards"),
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
        "a does not begin where the previous tensor ends",
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
    (
        "no index but shards",
        lambda f: (f / INDEX).unlink(),
        f"other .safetensors files; get {INDEX}",
    ),
    (
        "config is a pointer",
        lambda f: (f / "config.json").write_text(
            "version https://git-lfs.github.com/spec/v1\noid 1"
        ),
        "config.json is a Git LFS pointer",
    ),
    ("PyTorch", lambda f: holds_only(f, "pytorch_model.bin"), "but PyTorch files; save the model"),
    ("GGUF", lambda f: holds_only(f, "model.gguf"), "but a GGUF file, which needs no conversion"),
    ("no config", lambda f: (f / "config.json").unlink(), "config.json is missing"),
    ("config is a list", lambda f: (f / "config.json").write_text("[]"), "is not a JSON object"),
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
