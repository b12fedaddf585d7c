"""Options that say where a model lies, by llama.cpp's names."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

if TYPE_CHECKING:
    from ..offload.options import PlacementOptions

__all__ = ["PlacementArgs"]


class Fit(str, Enum):
    """Values of --fit."""

    auto = "auto"
    on = "on"
    off = "off"


class Switch(str, Enum):
    """Values of switches that can be left alone."""

    auto = "auto"
    on = "on"
    off = "off"


@dataclass(frozen=True)
class PlacementArgs:
    """Where the model lies: planned unless said."""

    PANEL: ClassVar[str] = "Placement"

    n_gpu_layers: Annotated[
        int | None,
        typer.Option(
            "-ngl",
            "--n-gpu-layers",
            "--gpu-layers",
            help="Number of layers on devices, the last ones first; the MTP block and the output "
            "count as layers; -1: all.",
            show_default="planned",
        ),
    ] = None
    draft_ngl: Annotated[
        int | None,
        typer.Option(
            "--draft-ngl",
            "-ngld",
            "--n-gpu-layers-draft",
            help="0: keep the MTP block on the CPU.",
            show_default=False,
        ),
    ] = None
    device: Annotated[
        str | None,
        typer.Option(
            "-dev",
            "--device",
            metavar="NAMES",
            help="Devices to use, in layer order: CUDA0,CUDA1; none: only the CPU.",
            show_default=False,
        ),
    ] = None
    main_gpu: Annotated[
        int | None,
        typer.Option(
            "-mg", "--main-gpu", help="Index of the only device to use.", show_default=False
        ),
    ] = None
    split_mode: Annotated[
        str,
        typer.Option(
            "-sm", "--split-mode", help="layer: split layers across devices; none: use one device."
        ),
    ] = "layer"
    tensor_split: Annotated[
        str | None,
        typer.Option(
            "-ts",
            "--tensor-split",
            metavar="SHARES",
            help="Share of the layers on each device: 3,1.",
            show_default=False,
        ),
    ] = None
    override_tensor: Annotated[
        list[str] | None,
        typer.Option(
            "-ot",
            "--override-tensor",
            metavar="PATTERN=DEVICE",
            help="Device for tensors whose names match PATTERN; repeatable, the first match wins.",
            show_default=False,
        ),
    ] = None
    cpu_moe: Annotated[
        bool, typer.Option("-cmoe", "--cpu-moe", help="Keep all routed experts on the CPU.")
    ] = False
    n_cpu_moe: Annotated[
        int,
        typer.Option(
            "-ncmoe",
            "--n-cpu-moe",
            min=0,
            help="Keep the routed experts of the first N layers on the CPU.",
        ),
    ] = 0
    fit: Annotated[
        Fit,
        typer.Option(
            "--fit",
            help="auto: plan unless you give placement options; on: always plan; "
            "off: skip the memory check.",
        ),
    ] = Fit.auto
    fit_margin: Annotated[
        str,
        typer.Option("--fit-margin", metavar="SIZE", help="Memory to leave free on each device."),
    ] = "1G"
    rpc: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT,...", help="Use the devices of these workers.", show_default=False
        ),
    ] = None
    rpc_child: Annotated[bool, typer.Option("--rpc-child", hidden=True)] = False
    kv_offload: Annotated[
        bool, typer.Option(help="Keep each layer's KV cache on the device of its attention.")
    ] = True
    op_offload: Annotated[
        bool | None,
        typer.Option(
            help="Copy weights from the CPU to a device for large batches.",
            show_default="if they fit",
        ),
    ] = None
    flash_attn: Annotated[Switch, typer.Option("-fa", "--flash-attn", help="Flash attention.")] = (
        Switch.auto
    )
    cache_type_k: Annotated[
        str, typer.Option("-ctk", "--cache-type-k", help="Type of cached keys: f16, q8_0, ...")
    ] = "f16"
    cache_type_v: Annotated[
        str | None,
        typer.Option(
            "-ctv", "--cache-type-v", help="Type of cached values.", show_default="same as the keys"
        ),
    ] = None
    ubatch: Annotated[
        int,
        typer.Option(
            "-ub", "--ubatch-size", min=0, help="Maximum number of tokens per decode; 0: 512."
        ),
    ] = 0
    mlock: Annotated[bool, typer.Option("--mlock", help="Never swap the weights out.")] = False
    mmap: Annotated[
        bool | None,
        typer.Option(help="Memory-map the file instead of reading it.", show_default="auto"),
    ] = None
    allow_thrash: Annotated[
        bool, typer.Option("--allow-thrash", help="Run a model that does not fit in memory.")
    ] = False

    def distant(self) -> tuple[str, ...]:
        """The workers, when the engine shall run in a child process for their sake: ggml ends the
        process that loses one. Raises `RequestError`."""
        from ..placement.rpc_probe import parse_endpoints

        return parse_endpoints(self.rpc) if self.rpc is not None and not self.rpc_child else ()

    def placement(self) -> PlacementOptions:
        """Raises `RequestError` for wishes that make no sense or contradict each other."""
        from ..errors import RequestError
        from ..offload import parse_size
        from ..offload.options import PlacementOptions
        from ..placement.rpc_probe import parse_endpoints

        if self.cpu_moe and self.n_cpu_moe:
            raise RequestError("--cpu-moe means all layers, so --n-cpu-moe contradicts it")
        switch = {None: "auto", True: "on", False: "off"}
        return PlacementOptions(
            n_gpu_layers=self.n_gpu_layers,
            draft_ngl=self.draft_ngl,
            split=_numbers(self.tensor_split),
            overrides=tuple(map(_override, self.override_tensor or ())),
            cpu_moe=-1 if self.cpu_moe else self.n_cpu_moe,
            fit=self.fit.value,
            devices=_names(self.device),
            main_gpu=_main_gpu(self.split_mode, self.main_gpu),
            rpc=parse_endpoints(self.rpc) if self.rpc is not None else (),
            margin=parse_size(self.fit_margin),
            load_mode=_load_mode(self.mmap, self.mlock),
            cache_k=self.cache_type_k,
            cache_v=self.cache_type_v or self.cache_type_k,
            flash=self.flash_attn.value,
            kv_offload=self.kv_offload,
            op_offload=switch[self.op_offload],  # type: ignore[arg-type]
            n_batch=self.ubatch,
            allow_thrash=self.allow_thrash,
        )


def _main_gpu(split_mode: str, number: int | None) -> int | None:
    """llama.cpp's way to say that one device shall be used alone."""
    from ..errors import RequestError

    if split_mode in ("row", "tensor"):
        raise RequestError(
            f"--split-mode {split_mode} splits single tensors across devices, which llama.cpp "
            "cannot do with an MTP block; use layer or none"
        )
    if split_mode not in ("layer", "none"):
        raise RequestError(f"--split-mode {split_mode!r} is unknown; use layer or none")
    return number or 0 if split_mode == "none" else number


def _load_mode(mmap: bool | None, mlock: bool) -> str:
    if mmap is False:
        return "mlock" if mlock else "none"
    if mlock:
        return "mmap+mlock"
    return "mmap" if mmap else "auto"


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def _numbers(text: str | None) -> tuple[float, ...]:
    from ..errors import RequestError

    try:
        return tuple(float(part) for part in _names((text or "").replace("/", ",")))
    except ValueError:
        raise RequestError(f"--tensor-split {text!r} is not a list of shares like 3,1") from None


def _override(text: str) -> tuple[str, str]:
    from ..errors import RequestError

    pattern, equals, device = text.rpartition("=")
    if not equals or not pattern or not device:
        raise RequestError(f"--override-tensor {text!r} is not PATTERN=DEVICE")
    return pattern, device
