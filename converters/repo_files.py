"""Which GGUF files of a repository are the model that was asked for, and its drafter's.

It knows file names, not the hub they lie on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import get_args

from ..errors import ConversionError
from .tensors import Side

__all__ = ["choose"]

_SIDES = tuple(f"{side}-" for side in get_args(Side))
"""What names of files with a drafter begin with: `mtp-`, `dspark-`."""
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def choose(
    files: Sequence[str], repo: str, quant: str | None
) -> tuple[list[str], list[str] | None]:
    """The files of the model that `quant` names, and those of its side file, in order.

    Raises `ConversionError` when it names none or several, or when shards are missing.
    """
    groups: dict[str, list[str]] = {}
    for file in sorted(files):
        match = _SHARD.fullmatch(file)
        if file.endswith(".gguf"):
            groups.setdefault(match[1] if match else file.removesuffix(".gguf"), []).append(file)
    sides = {name: g for name, g in groups.items() if _base(name).startswith(_SIDES)}
    models = {name: g for name, g in groups.items() if name not in sides and not _is_other(name)}
    fitting = {name: g for name, g in models.items() if _is_of(name, quant)}
    if len(fitting) != 1:
        what = f"{len(fitting)} of them match {quant}" if quant else "choose one with REPO:QUANT"
        raise ConversionError(
            f"{repo} has no GGUF model"
            if not models
            else f"{repo} has {', '.join(map(_base, models))}: {what}"
        )
    (model,) = fitting.values()
    _check_shards(model, repo)
    near = [g for name, g in sides.items() if _is_of(name, quant)] or list(sides.values())
    side = near[0] if near else None
    if side:
        _check_shards(side, repo)
    return model, side


def _base(name: str) -> str:
    return name.rpartition("/")[2]


def _is_other(name: str) -> bool:
    """Vision projectors and importance matrices travel as GGUF too."""
    return _base(name).startswith(("mmproj", "imatrix"))


def _is_of(name: str, quant: str | None) -> bool:
    if quant is None:
        return True
    return re.search(rf"(^|[-._/]){re.escape(quant)}($|[-./])", name, re.IGNORECASE) is not None


def _check_shards(files: Sequence[str], repo: str) -> None:
    match = _SHARD.fullmatch(files[0])
    if match and len(files) != int(match[3]):
        raise ConversionError(f"{repo} has {len(files)} of {int(match[3])} shards of {match[1]}")
