"""A checkpoint whose config.json or headers hold anything at all: a conversion, or one sentence."""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gguf_mtp.converters.checkpoint import Checkpoint
from gguf_mtp.converters.convert import ConvertOptions, plan
from gguf_mtp.converters.from_config import facts_from_config
from gguf_mtp.demo import CHECKPOINT
from gguf_mtp.errors import GgufMtpError

VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 7, 10**30, 1.5, math.inf, -math.inf, math.nan, 1e-320, "", "x",
    "sigmoid", "yarn", [], [1], [[]], ["F32"], [128, 128], {}, {"a": 1}, {"type": []},
    {"rope_type": "yarn"}, {"quant_method": "fp8"}, {"type": "yarn", "mscale": "x",
    "mscale_all_dim": "x"}, {"quant_method": ["fp8"], "weight_block_size": {"a": 1}},
]  # fmt: skip


def ends_in_words(work: Callable[[], object]) -> str:
    """What `work` is refused with, or nothing; anything but a sentence fails."""
    try:
        work()
    except GgufMtpError as error:
        said = str(error)
        assert "\n" not in said
        assert len(said) < 500, said
        return said
    return ""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mutants") / "checkpoint"
    return shutil.copytree(CHECKPOINT, folder)


def places(node: dict[str, Any], at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in node.items():
        yield (*at, key)
        if isinstance(value, dict):
            yield from places(value, (*at, key))


CONFIG = json.loads((CHECKPOINT / "config.json").read_text())
EXTRA = [("rope_parameters",), ("num_nextn_predict_layers",), ("hidden_act",), ("topk_method",)]
PLACES = sorted({*places(CONFIG), *EXTRA, ("quantization_config", "fmt")})


@pytest.mark.parametrize("place", PLACES, ids=".".join)
def test_any_value_in_the_configuration(copy: Path, place: tuple[str, ...]) -> None:
    changed = json.loads(json.dumps(CONFIG))
    inner = changed
    for key in place[:-1]:
        inner = inner[key]
    path = copy / "config.json"

    def convert() -> None:
        with plan(copy, ConvertOptions(type="f16")):
            pass

    said = {}
    try:
        for value in VALUES:
            inner[place[-1]] = value
            path.write_text(json.dumps(changed))
            said[repr(value)] = ends_in_words(convert)
            ends_in_words(lambda: facts_from_config(path, "q8_0"))
    finally:
        path.write_text(json.dumps(CONFIG))
    is_count = place[-1].startswith(("num_", "n_", "hidden_size"))
    if is_count and place[-1] != "num_key_value_heads":  # which nothing reads
        assert "config.json" in said["[1]"]
        assert "1000000000000000000000000000000" in said[repr(10**30)]


TOKENIZER_PLACES = [
    ("tokenizer.json", place.split("/"))
    for place in (
        "model", "model/type", "model/vocab", "model/vocab/&", "model/merges", "model/merges/0",
        "added_tokens", "added_tokens/0", "added_tokens/0/id", "added_tokens/0/content",
        "added_tokens/0/special", "normalizer", "pre_tokenizer", "pre_tokenizer/type",
        "pre_tokenizer/pretokenizers", "pre_tokenizer/pretokenizers/0",
        "pre_tokenizer/pretokenizers/0/pattern",
    )
]  # fmt: skip
TOKENIZER_PLACES += [
    ("tokenizer_config.json", [key])
    for key in ["bos_token", "eos_token", "pad_token", "add_bos_token", "chat_template"]
]
TOKENIZER_PLACES += [
    ("generation_config.json", [key]) for key in ["temperature", "top_p", "eos_token_id"]
]


@pytest.mark.parametrize(("file", "place"), TOKENIZER_PLACES)
def test_any_value_in_the_tokenizers_files(copy: Path, file: str, place: list[str]) -> None:
    path = copy / file
    sound = path.read_bytes()
    try:
        said = [_said_of(copy, path, sound, place, value) for value in VALUES]
        assert any(file in words for words in said)
    finally:
        path.write_bytes(sound)


def _said_of(copy: Path, path: Path, sound: bytes, place: list[str], value: Any) -> str:
    """What a conversion says when `value` stands at `place` in the file."""
    changed = json.loads(sound)
    inner = changed
    for key in place[:-1]:
        inner = inner[int(key) if isinstance(inner, list) else key]
    inner[int(place[-1]) if isinstance(inner, list) else place[-1]] = value
    path.write_text(json.dumps(changed))

    def convert() -> None:
        with plan(copy, ConvertOptions(type="f16")):
            pass

    return ends_in_words(convert)


@pytest.mark.parametrize(
    "file",
    ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
     "chat_template.jinja"],
)  # fmt: skip
def test_a_file_that_is_no_file(copy: Path, file: str) -> None:
    """A device that never ends, a folder, more than is ever read, bytes that are no text."""
    path, aside = copy / file, copy / "aside"
    is_there = path.exists()
    if is_there:
        path.rename(aside)

    def convert() -> None:
        with plan(copy, ConvertOptions(type="f16")):
            pass

    try:
        path.symlink_to("/dev/zero")
        assert ends_in_words(convert) == f"{path} is not a regular file"
        path.unlink()
        path.mkdir()
        assert ends_in_words(convert) == f"{path} is not a regular file"
        path.rmdir()
        with path.open("wb") as sparse:
            sparse.truncate(300 << 20)
        assert "but at most 268435456 are read of it" in ends_in_words(convert)
        path.write_bytes(b"\xff\xfe")
        assert f"{path} is not UTF-8" in ends_in_words(convert)
    finally:
        path.unlink(missing_ok=True)
        if is_there:
            aside.rename(path)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]},
        {"dtype": None, "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [math.inf], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": {"2": 1}, "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": "2", "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [True, 2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 1e999]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, "8"]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 16]},
        {"dtype": "F32", "shape": [2], "data_offsets": None},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, -8]},
        {"dtype": "F32", "shape": [10**30], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2]},
        ["F32", [2], [0, 8]],
        "F32",
        None,
        1e999,
    ],
)
def test_any_entry_in_a_shards_header(tmp_path: Path, entry: Any) -> None:
    (tmp_path / "config.json").write_text("{}")
    shard = tmp_path / "model.safetensors"
    header = json.dumps({"a.weight": entry}).encode()
    shard.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    said = ends_in_words(lambda: Checkpoint(tmp_path).close())
    assert str(shard) in said


@pytest.mark.parametrize("header", [b"[]", b"1", b'"x"', b"{}" + b"\xff", b'{"__metadata__": 1}x'])
def test_a_header_that_is_no_object(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    said = ends_in_words(lambda: Checkpoint(tmp_path).close())
    assert "safetensors header that cannot be read" in said
