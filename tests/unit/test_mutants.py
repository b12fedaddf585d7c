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
    for value in VALUES:
        inner[place[-1]] = value
        path.write_text(json.dumps(changed))
        said[repr(value)] = ends_in_words(convert)
        ends_in_words(lambda: facts_from_config(path, "q8_0"))
    is_count = place[-1].startswith(("num_", "n_", "hidden_size"))
    if is_count and place[-1] != "num_key_value_heads":  # which nothing reads
        assert "config.json" in said["[1]"]
        assert "1000000000000000000000000000000" in said[repr(10**30)]


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
