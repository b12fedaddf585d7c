"""Planning a conversion: everything is decided and checked here, and nothing is written.

A `ConversionJob` holds the output's header, byte for byte, and every tensor's type, place and
sources. Only headers are read, with two exceptions: the MTP block's copies of embedding and head
are compared with the originals, and an importance matrix is looked through.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from ..errors import ConversionError
from . import CONVERTER_VERSION, mla, recipes
from .checkpoint import Checkpoint, folder_name
from .families import adapt, needs
from .gguf_file import TypedTensor, header, offsets, pad, size, split_keys
from .imatrix import Imatrix
from .local_shards import Shards
from .output_shards import OutFile, cut, paths
from .tensors import Adapted, Side, Value
from .tokenizer import vocabulary
from .tokenizer_files import GenerationConfig, check

_QUANTIZATION_VERSION = 2  # ggml's GGML_QNT_VERSION


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """What to make of a checkpoint.

    `type` names a recipe; `tensor_types` are PATTERN=TYPE, the first match wins; `draft_head` gives
    the MTP block a head of its own in that type; `mtp` keeps the block, drops it, or writes nothing
    else; `n_threads` 0 takes every core; `name` is the model's name, the folder's by default.
    `split` is the most bytes of tensors in one file. `resume` goes on with an interrupted run;
    `force` starts over where one left something, and though the disk looks too small.
    """

    type: str = "q8_0"
    tensor_types: tuple[str, ...] = ()
    imatrix: Path | None = None
    draft_head: str | None = None
    mtp: mla.Mtp = "keep"
    n_threads: int = 0
    name: str | None = None
    resume: bool = False
    force: bool = False
    split: int | None = None

    def needs(self, config: Mapping[str, Any], name: str) -> bool:
        """Whether a tensor is read at all."""
        return needs(config, self.mtp, name)

    @property
    def threads(self) -> int:
        if self.n_threads:
            return self.n_threads
        usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
        return len(usable) or os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Account:
    """Where everything went: `n_read` = `n_written` + `n_merged` + len(`dropped`) source tensors.

    `dropped` maps names to reasons. Bytes are those of the output. `mtp_block` is the number of the
    block that holds the MTP tensors, None without one; `side` is the drafter that gets a file of
    its own, and with `is_dspark` this is that file.
    """

    n_read: int
    n_written: int
    n_merged: int
    dropped: dict[str, str]
    n_tensors: int
    n_bytes: int
    bytes_by_type: dict[str, int]
    mtp_block: int | None
    mtp_bytes: int
    notes: tuple[str, ...]
    side: Side | None = None
    is_dspark: bool = False


class Shard(NamedTuple):
    """One file of the output: its header, byte for byte, and its tensors' places."""

    header: bytes
    tensors: tuple[TypedTensor, ...]

    @property
    def ends(self) -> list[int]:
        """The file's length when tensor i is whole; the last one is the file's size."""
        return [len(self.header) + t.offset + pad(t.n_bytes) for t in self.tensors]


class Output(NamedTuple):
    """One model of the output, in one file or in several."""

    shards: tuple[Shard, ...]
    account: Account

    @property
    def tensors(self) -> list[TypedTensor]:
        return [t for shard in self.shards for t in shard.tensors]

    def files(self, out: Path) -> list[OutFile]:
        """`out`, or the shards it becomes."""
        names = paths(out, len(self.shards))
        return [OutFile(*f) for f in zip(names, (s.ends for s in self.shards), strict=True)]


@dataclass(frozen=True, slots=True)
class ConversionJob:
    """A conversion that has been planned and not begun. `side` is the drafter that must be a file
    of its own (`account.side`). `fingerprint` stands for all bytes of both."""

    checkpoint: Checkpoint
    main: Output
    side: Output | None
    imatrix: Imatrix | None
    fingerprint: str

    @property
    def account(self) -> Account:
        """That of the model itself."""
        return self.main.account

    @property
    def shards(self) -> list[Shard]:
        """Of every file, the drafter's last."""
        return [*self.main.shards, *(self.side.shards if self.side else ())]

    @property
    def tensors(self) -> tuple[TypedTensor, ...]:
        return tuple(t for shard in self.shards for t in shard.tensors)

    @property
    def n_bytes(self) -> int:
        """Bytes of all files together."""
        return sum(shard.ends[-1] for shard in self.shards)

    def outputs(self, out: Path) -> list[tuple[Path, Output]]:
        """The model as `out`, and the drafter beside it where it is a file of its own."""
        sides = [(side_path(out, self.account.side or "mtp"), self.side)] if self.side else []
        return [(out, self.main), *sides]

    def files(self, out: Path) -> list[OutFile]:
        """Every file, in the order of `shards`."""
        return [file for path, output in self.outputs(out) for file in output.files(path)]


def side_path(out: Path, side: Side = "mtp") -> Path:
    """Where the drafter of the model in `out` is found, if it is a file of its own."""
    return out.with_name(f"{side}-{out.name}")


@contextmanager
def plan(
    source: Path, options: ConvertOptions, storage: Shards | None = None
) -> Iterator[ConversionJob]:
    """A job whose checkpoint stays open inside the block; `storage` holds its shards if the folder
    does not.

    Raises `ConversionError` with the file, key or tensor that cannot be converted.
    """
    imatrix = Imatrix(options.imatrix) if options.imatrix else None
    wish = recipes.QuantOptions(
        recipes.parse_recipe(options.type),
        tuple(map(recipes.parse_override, options.tensor_types)),
        recipes.parse_type(options.draft_head) if options.draft_head else None,
        imatrix is not None,
    )
    with Checkpoint(source, options.needs, storage) as checkpoint:
        has_head = wish.draft_head is not None
        adapted = [adapt(checkpoint, mla.Choices(options.mtp, has_head))]
        if adapted[0].side:
            adapted.append(adapt(checkpoint, mla.Choices("only", has_head)))
        recipes.check_overrides(wish, [t for one in adapted for t in one.tensors])
        main, *sides = (_output(checkpoint, one, options, wish, imatrix) for one in adapted)
        yield ConversionJob(
            checkpoint,
            main,
            sides[0] if sides else None,
            imatrix,
            _fingerprint(
                checkpoint,
                b"".join(shard.header for output in (main, *sides) for shard in output.shards),
                imatrix,
            ),
        )


def _output(
    checkpoint: Checkpoint,
    adapted: Adapted,
    options: ConvertOptions,
    wish: recipes.QuantOptions,
    imatrix: Imatrix | None,
) -> Output:
    choice = recipes.choose(adapted, wish)
    parts = _place(adapted, choice.types, options.split)
    tensors = [t for part in parts for t in part]
    notes = [*adapted.notes, *choice.notes, *_check_importance(tensors, wish, imatrix)]
    made = _shards(_metadata(checkpoint, adapted, options, wish), parts)
    return Output(made, _account(checkpoint, adapted, tensors, notes))


def needs_importance(placed: TypedTensor) -> bool:
    """Whether an importance matrix changes this tensor's bytes."""
    return GGML_QUANT_SIZES[placed.type][0] > 1


def _place(
    adapted: Adapted, types: Sequence[GGMLQuantizationType], most: int | None
) -> list[list[TypedTensor]]:
    """The tensors of each file, with their offsets in it."""
    sizes = size(adapted.tensors, types)
    return [
        list(map(TypedTensor, adapted.tensors[s], types[s], sizes[s], offsets(sizes[s])))
        for s in cut(sizes, most)
    ]


def _shards(kv: dict[str, Value], parts: Sequence[Sequence[TypedTensor]]) -> tuple[Shard, ...]:
    """The first file carries the metadata, as gguf-split writes it."""
    n_tensors = sum(map(len, parts))
    made = []
    for i, part in enumerate(parts):
        keys = (kv if i == 0 else {}) | split_keys(i, len(parts), n_tensors)
        made.append(Shard(header(keys, [t.entry for t in part]), tuple(part)))
    return tuple(made)


def _check_importance(
    tensors: Sequence[TypedTensor], wish: recipes.QuantOptions, imatrix: Imatrix | None
) -> list[str]:
    """Raises when a type is worthless without importances and they are not there."""
    unknown = []
    for placed in tensors:
        values = imatrix.values(placed.tensor) if imatrix and needs_importance(placed) else None
        if values is None and recipes.needs_imatrix(placed.tensor, placed.type, wish.recipe):
            raise ConversionError(
                f"{placed.tensor.name} as {placed.type.name.lower()} needs an importance matrix"
                + (f", but {imatrix.path} has none for it" if imatrix else "; use --imatrix")
            )
        if values is None and needs_importance(placed):
            unknown.append(placed.tensor.name)
    if imatrix is None or not unknown:
        return []
    return [f"{imatrix.path} has no values for {len(unknown)} tensors; the first is {unknown[0]}"]


def _name(name: str) -> str:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ConversionError(f"the name {name!r} is not UTF-8; give another with --name") from None
    return name


def _metadata(
    checkpoint: Checkpoint, adapted: Adapted, options: ConvertOptions, wish: recipes.QuantOptions
) -> dict[str, Value]:
    kv: dict[str, Value] = {
        "general.architecture": adapted.architecture,
        "general.type": "model",
        "general.name": _name(options.name or folder_name(checkpoint.folder)),
        "general.file_type": int(wish.recipe.file_type),
        "general.quantization_version": _QUANTIZATION_VERSION,
        "gguf_mtp.converter_version": CONVERTER_VERSION,
    }
    file = "generation_config.json"
    generation = check(file, GenerationConfig, checkpoint.json(file) or {})
    for key, field in (("temp", "temperature"), ("top_p", "top_p")):
        if generation.get(field) is not None:
            kv[f"general.sampling.{key}"] = float(generation[field])
    kv |= adapted.kv
    n_vocab = adapted.kv[f"{adapted.architecture}.vocab_size"]
    assert isinstance(n_vocab, int)
    if adapted.chat_template is not None:
        kv["tokenizer.chat_template"] = adapted.chat_template(str(kv["general.name"]))
    return kv | vocabulary(checkpoint, n_vocab)  # a template of the checkpoint's own wins


def _fingerprint(checkpoint: Checkpoint, head: bytes, imatrix: Imatrix | None) -> str:
    """The header holds every name, shape, type and key; the rest is sources and kernels."""
    digest = hashlib.sha256(head)
    digest.update(checkpoint.fingerprint.encode())
    digest.update(imatrix.fingerprint.encode() if imatrix else b"-")
    with contextlib.suppress(PackageNotFoundError):  # planning alone needs no kernels
        digest.update(version("llama-cpp-python").encode())
    return digest.hexdigest()


def _account(
    checkpoint: Checkpoint, adapted: Adapted, tensors: Sequence[TypedTensor], notes: Sequence[str]
) -> Account:
    prefix = f"blk.{adapted.mtp_block}."
    return Account(
        n_read=len(checkpoint.tensors),
        n_written=adapted.n_written,
        n_merged=adapted.n_merged,
        dropped=adapted.dropped,
        n_tensors=len(tensors),
        n_bytes=sum(t.n_bytes for t in tensors),
        bytes_by_type=recipes.bytes_by_type(
            (t.type for t in tensors), (t.n_bytes for t in tensors)
        ),
        mtp_block=adapted.mtp_block,
        mtp_bytes=sum(t.n_bytes for t in tensors if t.tensor.name.startswith(prefix)),
        notes=tuple(notes),
        side=adapted.side,
        is_dspark=adapted.is_dspark,
    )
