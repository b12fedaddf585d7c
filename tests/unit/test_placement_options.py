"""Placement options: llama.cpp's names, and the contradictions that are refused in a sentence."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from gguf_mtp.cli.placement_options import PlacementArgs, Switch
from gguf_mtp.errors import RequestError
from gguf_mtp.loading.loader import LoadOptions
from gguf_mtp.offload.options import PlacementOptions


def placed(**options: Any) -> PlacementOptions:
    return PlacementArgs(**options).placement()


def test_nothing_said_is_a_plan() -> None:
    assert placed() == PlacementOptions()
    assert placed().hand.is_empty


def test_options_become_wishes() -> None:
    found = placed(
        n_gpu_layers=12,
        draft_ngl=0,
        device="CUDA1, CUDA0",
        tensor_split="3,1",
        override_tensor=[r"blk\.1\..*_exps=CPU", "a=b=CUDA0"],
        n_cpu_moe=5,
        fit_margin="512M",
        rpc="a:1,b:2",
        kv_offload=False,
        op_offload=True,
        flash_attn=Switch.on,
        cache_type_k="q8_0",
        ubatch=128,
        mmap=False,
        mlock=True,
        allow_thrash=True,
    )
    assert found == PlacementOptions(
        n_gpu_layers=12,
        draft_ngl=0,
        devices=("CUDA1", "CUDA0"),
        split=(3.0, 1.0),
        overrides=((r"blk\.1\..*_exps", "CPU"), ("a=b", "CUDA0")),
        cpu_moe=5,
        margin=512 << 20,
        rpc=("a:1", "b:2"),
        kv_offload=False,
        op_offload="on",
        flash="on",
        cache_k="q8_0",
        cache_v="q8_0",
        n_batch=128,
        load_mode="mlock",
        allow_thrash=True,
    )


def test_one_device_alone() -> None:
    assert placed(split_mode="none").main_gpu == 0
    assert placed(split_mode="none", main_gpu=2).main_gpu == 2
    assert placed(main_gpu=2).main_gpu == 2
    assert placed().main_gpu is None


@pytest.mark.parametrize(
    ("mmap", "mlock", "mode"),
    [
        (None, False, "auto"),
        (True, False, "mmap"),
        (False, False, "none"),
        (None, True, "mmap+mlock"),
        (True, True, "mmap+mlock"),
        (False, True, "mlock"),
    ],
)
def test_ways_to_load(mmap: bool | None, mlock: bool, mode: str) -> None:
    assert placed(mmap=mmap, mlock=mlock).load_mode == mode


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"cpu_moe": True, "n_cpu_moe": 3}, "--n-cpu-moe contradicts it"),
        ({"fit": "on", "n_gpu_layers": 3}, "--fit on plans by itself"),
        ({"fit": "on", "cpu_moe": True}, "--fit on plans by itself"),
        ({"main_gpu": 1, "tensor_split": "1,1"}, "--device and --tensor-split contradict it"),
        ({"main_gpu": 1, "device": "CUDA0"}, "--device and --tensor-split contradict it"),
        ({"n_gpu_layers": 0, "tensor_split": "1,1"}, "-ngl 0 keeps everything on the CPU"),
        (
            {"flash_attn": Switch.off, "cache_type_v": "q8_0"},
            "needs flash attention, but it is off",
        ),
        ({"tensor_split": "a"}, "is not a list of shares"),
        ({"override_tensor": ["exps"]}, "is not PATTERN=DEVICE"),
        ({"override_tensor": ["=CPU"]}, "is not PATTERN=DEVICE"),
        ({"fit_margin": "much"}, "'much' is not a size"),
        ({"rpc": "host"}, "write host:port"),
        ({"split_mode": "tensor"}, "cannot do with an MTP block"),
        ({"split_mode": "rows"}, "is unknown; use layer or none"),
    ],
)
def test_contradictions_are_sentences(options: dict[str, Any], says: str) -> None:
    if "fit" in options:
        fit = PlacementArgs.__dataclass_fields__["fit"].default
        options = options | {"fit": type(fit)(options["fit"])}
    with pytest.raises(RequestError, match=says):
        placed(**options)


@pytest.mark.parametrize("wishes", [{"cache_k": "q8_0", "cache_v": "q8_0"}, {"flash": "on"}])
def test_strict_has_a_cache_of_its_own(wishes: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="--strict uses an F32 KV cache"):
        LoadOptions(strict=True, placement=dataclasses.replace(PlacementOptions(), **wishes))
