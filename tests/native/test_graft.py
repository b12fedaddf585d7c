"""Grafting and extracting copy bytes: what is written, resumed and refused. No llama.cpp."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gguf_mtp.converters import output_shards
from gguf_mtp.converters.convert import ConvertOptions, convert
from gguf_mtp.converters.graft import CopyOptions, Report, extract, graft
from gguf_mtp.converters.mla import Mtp
from gguf_mtp.converters.resume_file import PartialFile, partial_path
from gguf_mtp.demo import CHECKPOINT
from gguf_mtp.errors import ConversionError, GgufMtpError, UnsupportedModel
from gguf_mtp.gguf import model_facts
from tests.support.gguf_files import Model

pytestmark = pytest.mark.native  # converting takes ggml's kernels


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo in Q8_0 as keep.gguf, drop.gguf and only.gguf."""
    folder = tmp_path_factory.mktemp("parts")
    parts: tuple[Mtp, ...] = ("keep", "drop", "only")
    for mtp in parts:
        convert(CHECKPOINT, folder / f"{mtp}.gguf", ConvertOptions(mtp=mtp, name="demo"))
    return folder


def contents(path: Path) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
    facts = model_facts.read_any(path)
    tensors = {
        t.name: (t.shape, t.type, Path(t.file).read_bytes()[t.offset : t.offset + t.n_bytes])
        for t in facts.tensors
    }
    kv = {k: v for k, v in facts.kv.items() if not k.startswith("split.")}
    return kv, tensors


def join(folder: Path, out: Path, report: Report | None = None, **options: Any) -> Path:
    pair = folder / "drop.gguf", folder / "only.gguf"
    return graft(*pair, out, CopyOptions(**options), report).path


def test_the_parts_make_the_whole(folder: Path, tmp_path: Path) -> None:
    assert contents(join(folder, tmp_path / "out.gguf")) == contents(folder / "keep.gguf")


def test_shards_make_the_whole(folder: Path, tmp_path: Path) -> None:
    first = join(folder, tmp_path / "out.gguf", split=1_000_000)
    files = sorted(tmp_path.iterdir())
    assert first == files[0]
    assert len(files) > 5
    assert contents(first) == contents(folder / "keep.gguf")
    whole = contents(folder / "keep.gguf")[1]
    largest = max(len(data) for _, _, data in whole.values())
    assert all(f.stat().st_size <= max(1_000_000, largest) + 20_000 for f in files[1:])


def test_extract_is_the_inverse_to_the_byte(folder: Path, tmp_path: Path) -> None:
    extract(folder / "keep.gguf", tmp_path / "mtp.gguf", CopyOptions())
    assert (tmp_path / "mtp.gguf").read_bytes() == (folder / "only.gguf").read_bytes()


def stop_at(share: float) -> Report:
    def report(_: str, done: int, total: int) -> None:
        if done > share * total:
            raise KeyboardInterrupt

    return report


@pytest.mark.parametrize("split", [None, 1_000_000])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.97])
def test_goes_on_after_a_kill(
    folder: Path, tmp_path: Path, split: int | None, share: float
) -> None:
    with pytest.raises(KeyboardInterrupt):
        join(folder, tmp_path / "out.gguf", stop_at(share), split=split)
    assert not list(tmp_path.glob("*.gguf"))
    with pytest.raises(ConversionError, match="--resume continues it"):
        join(folder, tmp_path / "out.gguf", split=split)
    written: list[int] = []
    first = join(
        folder,
        tmp_path / "out.gguf",
        lambda _, done, __: written.append(done),
        split=split,
        resume=True,
    )
    assert written[0] > (share - 0.3) * written[-1]  # it did not begin again
    assert contents(first) == contents(folder / "keep.gguf")
    assert {p.suffix for p in tmp_path.iterdir()} == {".gguf"}


@pytest.mark.parametrize("n", [1, 3])
def test_goes_on_after_a_kill_between_names(
    folder: Path, tmp_path: Path, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first shard gets its name last: until then nobody can load half a set."""
    name, named = PartialFile.name, list[Path]()

    def dies(self: PartialFile) -> None:
        if len(named) == n:
            raise KeyboardInterrupt
        named.append(self.out)
        name(self)

    with monkeypatch.context() as patch:
        patch.setattr(PartialFile, "name", dies)
        with pytest.raises(KeyboardInterrupt):
            join(folder, tmp_path / "out.gguf", split=1_000_000)
    first = output_shards.paths(tmp_path / "out.gguf", int(named[0].stem[-5:]))[0]
    assert not first.exists()
    assert partial_path(first).exists()
    assert join(folder, tmp_path / "out.gguf", split=1_000_000, resume=True) == first
    assert contents(first) == contents(folder / "keep.gguf")
    assert {p.suffix for p in tmp_path.iterdir()} == {".gguf"}


def test_shards_of_another_split_are_not_left(folder: Path, tmp_path: Path) -> None:
    join(folder, tmp_path / "out.gguf", split=1_000_000)
    old = set(tmp_path.iterdir())
    (tmp_path / "out-other-00001-of-00002.gguf").touch()
    with pytest.raises(ConversionError, match=r"out-00001-of-\d+.gguf is left from another split"):
        join(folder, tmp_path / "out.gguf", split=2_000_000)
    assert old < set(tmp_path.iterdir())
    first = join(folder, tmp_path / "out.gguf", split=2_000_000, force=True)
    assert not old & set(tmp_path.iterdir())
    assert (tmp_path / "out-other-00001-of-00002.gguf").exists()
    assert contents(first) == contents(folder / "keep.gguf")


def test_what_is_read_is_never_replaced(folder: Path, tmp_path: Path) -> None:
    """Neither by the output's own name, nor as shards that --force would clear away beside it."""
    side = extract(folder / "keep.gguf", tmp_path / "side.gguf", CopyOptions()).path
    first = join(folder, tmp_path / "model.gguf", split=1_000_000)
    (tmp_path / "link.gguf").symlink_to(first)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for force in (False, True):
        for name in (first.name, "model.gguf", "link.gguf"):
            with pytest.raises(ConversionError, match=r"is an input; give the output another"):
                extract(first, tmp_path / name, CopyOptions(force=force))
        with pytest.raises(ConversionError, match=r"side.gguf is an input"):
            graft(folder / "drop.gguf", side, side, CopyOptions(force=force))
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("content", [b"my notes", b"\0" * 8])
def test_only_a_gguf_makes_room_for_another(folder: Path, tmp_path: Path, content: bytes) -> None:
    out = tmp_path / "out.gguf"
    out.write_bytes(content)
    for force in (False, True):
        with pytest.raises(ConversionError, match=r"out.gguf exists and is not a GGUF file"):
            join(folder, out, force=force)
    assert list(tmp_path.iterdir()) == [out]
    assert out.read_bytes() == content
    for other in (b"", b"GGUF of old"):
        out.write_bytes(other)
        assert contents(join(folder, out)) == contents(folder / "keep.gguf")
    with pytest.raises(ConversionError, match=r"/dev/null exists and is not a GGUF file"):
        join(folder, Path("/dev/null"))


def test_convert_resumes_in_shards(folder: Path, tmp_path: Path) -> None:
    options = ConvertOptions(name="demo", split=1_000_000)
    out = tmp_path / "out.gguf"

    def stop(p: Any) -> None:
        if p.n_done > p.n_total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(CHECKPOINT, out, options, stop)
    convert(CHECKPOINT, out, ConvertOptions(name="demo", split=1_000_000, resume=True))
    assert contents(min(tmp_path.glob("*.gguf"))) == contents(folder / "keep.gguf")


def bent(path: Path, change: Callable[[Model], object]) -> Path:
    model = Model()
    del model.hyper["nextn_predict_layers"]
    model.hyper["block_count"] = 2
    model.shapes = {n: s for n, s in model.shapes.items() if not n.startswith("blk.2.")}
    change(model)
    return model.write(path)


def test_refusals_write_nothing(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    keep, drop, only = (folder / f"{name}.gguf" for name in ("keep", "drop", "only"))
    tiny = bent(tmp_path / "tiny.gguf", lambda _: None)
    for base, mtp, why in [
        (keep, only, "already has a block after its 6 layers"),
        (drop, drop, "the file has no MTP block"),
        (only, only, "without the rest of the model"),
        (tiny, only, "block follows 6 layers, but the model has 2"),
        (tmp_path / "none.gguf", only, "No such file"),
    ]:
        with pytest.raises(GgufMtpError, match=why):
            graft(base, mtp, out, CopyOptions())
    with pytest.raises(UnsupportedModel, match="the file has no MTP block"):
        extract(drop, out, CopyOptions())
    with pytest.raises(ConversionError, match="is a folder"):
        extract(keep, tmp_path, CopyOptions())
    assert [p.name for p in tmp_path.iterdir()] == ["tiny.gguf"]


def test_values_per_layer_are_refused(tmp_path: Path) -> None:
    """The block would have no entry in them, and llama.cpp would read past their end."""
    base = bent(
        tmp_path / "base.gguf", lambda m: m.hyper.update({"expert_feed_forward_length": [20, 20]})
    )
    model = Model()
    kept = ("token_embd.weight", "output_norm.weight", "output.weight")
    model.shapes = {n: s for n, s in model.shapes.items() if n in kept or n.startswith("blk.2.")}
    model.hyper["expert_feed_forward_length"] = [20, 20]
    with pytest.raises(
        ConversionError, match=r"one deepseek2\.expert_feed_forward_length per layer"
    ):
        graft(base, model.write(tmp_path / "m.gguf"), tmp_path / "out.gguf", CopyOptions())


@pytest.mark.parametrize(
    ("sizes", "most", "expected"),
    [
        ([10, 20, 30], None, [slice(0, 3)]),
        ([32, 32, 32], 64, [slice(0, 2), slice(2, 3)]),
        ([32, 33, 32], 64, [slice(0, 1), slice(1, 2), slice(2, 3)]),  # 33 is 64 padded
        ([100, 32], 64, [slice(0, 1), slice(1, 2)]),  # one too large stands alone
    ],
)  # fmt: skip
def test_cut_is_gguf_splits_rule(sizes: list[int], most: int | None, expected: object) -> None:
    assert output_shards.cut(sizes, most) == expected


def test_sizes() -> None:
    assert (output_shards.parse_size("40G"), output_shards.parse_size("5M")) == (
        40 * 10**9,
        5 * 10**6,
    )
    for text in ("", "40", "0G", "1.5G", "40g", "40GB"):
        with pytest.raises(ConversionError, match="is not a number with M or G"):
            output_shards.parse_size(text)


def gguf_mtp(*args: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from gguf_mtp.cli.app import main; main()", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_commands(folder: Path, tmp_path: Path) -> None:
    out, mtp = tmp_path / "out.gguf", tmp_path / "mtp.gguf"
    done = gguf_mtp("graft", folder / "drop.gguf", folder / "only.gguf", "-o", out)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{out} has 128 tensors, {out.stat().st_size:,} bytes" in done.stdout
    assert "drafts accepted" in done.stdout
    done = gguf_mtp("extract", out, "-o", mtp, "-q")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    facts = json.loads(gguf_mtp("inspect", mtp, "--json").stdout)
    assert (facts["n_layer"], facts["n_mtp"], facts["can_draft"]) == (6, 1, True)
    assert "--draft-model" in facts["reason"]
    done = gguf_mtp("graft", out, mtp, "-o", tmp_path / "twice.gguf")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("error: ")


def test_convert_only_names_its_file(tmp_path: Path) -> None:
    done = gguf_mtp("convert", CHECKPOINT, "--mtp", "only", "-o", tmp_path / "mtp-x.gguf")
    assert done.returncode == 0
    assert "the trunk is left out (--mtp only)" in done.stdout
    assert f"use it with --draft-model {tmp_path / 'mtp-x.gguf'}" in done.stdout
    command = [sys.executable, "-c", "from gguf_mtp.cli.app import main; main()", "convert"]
    more = [str(CHECKPOINT), "--mtp", "only", "--name", "demo", "-q"]
    subprocess.run([*command, *more], cwd=tmp_path, check=True, timeout=60)
    assert (tmp_path / "mtp-demo.gguf").exists()
