"""What a user may say about where a model lies, and which wishes contradict each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gguf_mtp.errors import RequestError
from gguf_mtp.offload.machine import MARGIN
from gguf_mtp.offload.manual import ByHand

__all__ = ["LOAD_MODES", "PlacementOptions"]

LOAD_MODES = {"auto": -1, "none": 0, "mmap": 1, "mlock": 2, "mmap+mlock": 3, "direct-io": 4}
"""Ways to load weights by name -> llama.cpp's enum llama_load_mode."""
Fit = Literal["auto", "on", "off"]
Switch = Literal["auto", "on", "off"]


@dataclass(frozen=True, slots=True)
class PlacementOptions:
    """What a user says about where a model lies; by default a plan is made.

    `n_gpu_layers`, `draft_ngl`, `split`, `overrides`, `cpu_moe`: see `offload.manual.ByHand`; any
    of them makes it the user's plan, which is checked and not changed. `fit`: "auto" plans where a
    device is present and nothing was said, "on" plans in any case, "off" checks nothing.
    `devices` are names, in the order that layers take them (none: all); `main_gpu` a number, that
    of the only one to use. `rpc` are workers, "host:port". `load_mode`: one of `LOAD_MODES`.
    `flash` and `op_offload`: "auto" leaves it to llama.cpp and the plan. Raises `RequestError` for
    wishes that contradict each other.
    """

    n_gpu_layers: int | None = None
    draft_ngl: int | None = None
    split: tuple[float, ...] = ()
    overrides: tuple[tuple[str, str], ...] = ()
    cpu_moe: int = 0
    fit: Fit = "auto"
    devices: tuple[str, ...] = ()
    main_gpu: int | None = None
    rpc: tuple[str, ...] = ()
    margin: int = MARGIN
    load_mode: str = "auto"
    cache_k: str = "f16"
    cache_v: str = "f16"
    flash: Switch = "auto"
    kv_offload: bool = True
    op_offload: Switch = "auto"
    n_batch: int = 0
    allow_thrash: bool = False

    def __post_init__(self) -> None:
        for is_odd, why in (
            (
                self.fit == "on" and not self.hand.is_empty,
                "--fit on plans by itself, so -ngl, --draft-ngl, --tensor-split, --override-tensor "
                "and --cpu-moe cannot be given with it",
            ),
            (
                self.main_gpu is not None and bool(self.devices or self.split),
                "--main-gpu uses a single device, so --device and --tensor-split contradict it",
            ),
            (
                self.n_gpu_layers == 0 and bool(self.split or self.cpu_moe),
                "-ngl 0 keeps everything on the CPU, so --tensor-split and --cpu-moe cannot be "
                "given with it",
            ),
            (
                self.flash == "off" and self.cache_v not in ("f32", "f16", "bf16"),
                f"a {self.cache_v} value cache needs flash attention, but it is off",
            ),
            (
                self.load_mode not in LOAD_MODES,
                f"the load mode {self.load_mode!r} is not one of {', '.join(LOAD_MODES)}",
            ),
        ):
            if is_odd:
                raise RequestError(why)

    @property
    def hand(self) -> ByHand:
        return ByHand(self.n_gpu_layers, self.draft_ngl, self.split, self.overrides, self.cpu_moe)
