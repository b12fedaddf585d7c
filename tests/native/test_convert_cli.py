"""`gguf-mtp convert` as a user meets it: what it prints, refuses, keeps and verifies."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gguf_mtp.demo import CHECKPOINT
from tests.support.checkpoints import Entry, changed_demo, widened

pytestmark = pytest.mark.native

COMMAND = [sys.executable, "-c", "from gguf_mtp.cli.app import main; main()", "convert"]


def convert(*args: str | Path) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_converts_verifies_and_accounts(tmp_path: Path) -> None:
    out = tmp_path / "demo.gguf"
    run = convert(CHECKPOINT, "-o", out)
    assert (run.returncode, run.stderr) == (0, "")
    size = out.stat().st_size
    assert f"takes {size:,} bytes of disk" in run.stdout
    assert re.search(r"about \d+ MB of memory and 1 s on \d+ threads", run.stdout)
    assert "449 read = 96 written + 351 merged + 2 dropped" in run.stdout
    assert "dropped model.layers.6.embed_tokens.weight: bit-equal to" in run.stdout
    assert "MTP block: blk.6, 1,693,856 bytes" in run.stdout
    verdict = re.search(r"self-test: (\d+) tokens .*; (\d+) of (\d+) drafts accepted", run.stdout)
    assert verdict is not None
    n_tokens, accepted, drafted = map(int, verdict.groups())
    assert n_tokens >= 32
    assert accepted > drafted / 2


def test_quiet(tmp_path: Path) -> None:
    run = convert(CHECKPOINT, "-o", tmp_path / "x.gguf", "-q", "--type", "q4_k_m")
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_bar_on_a_terminal_only(tmp_path: Path) -> None:
    """The bar goes to standard error, so that standard output stays a clean account."""
    source = widened(tmp_path / "checkpoint")
    leader, follower = pty.openpty()
    command = [*COMMAND, str(source), "-o", str(tmp_path / "x.gguf"), "--no-verify"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=follower)
    os.close(follower)
    shown = b""
    while True:
        try:
            shown += (chunk := os.read(leader, 4096))
        except OSError:  # how a terminal says that nobody writes to it any more
            break
        if not chunk:
            break
    printed, _ = process.communicate(timeout=60)
    os.close(leader)
    assert process.returncode == 0
    assert re.search(rb"blk\.\d+\.", shown)
    assert re.search(rb"[kM]B/s", shown)
    assert b"\x1b" not in printed


def test_dry_run_writes_nothing(tmp_path: Path) -> None:
    run = convert(CHECKPOINT, "-o", tmp_path / "x.gguf", "--dry-run", "--type", "q4_k_m")
    assert run.returncode == 0
    assert list(tmp_path.iterdir()) == []
    line = next(li for li in run.stdout.splitlines() if li.startswith("blk.6.ffn_up_exps.weight"))
    assert line.split() == [
        "blk.6.ffn_up_exps.weight", "Q4_K", "8x192x256", "221,184",
        "model.layers.6.mlp.experts.0.up_proj.weight", "+", "7", "more",
    ]  # fmt: skip
    assert "note: attn_k_b.weight: rows of 32 cannot be q4_k, so q5_0 is used" in run.stdout


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("/nowhere",), "error: /nowhere is not a folder; give a checkpoint's folder"),
        ((CHECKPOINT, "--type", "q7"), "error: unknown type 'q7'; known types: f32, f16"),
        ((CHECKPOINT, "--tensor-type", "x"), "error: 'x' is not PATTERN=TYPE"),
        ((CHECKPOINT, "--type", "q2_k_s"), "needs an importance matrix; use --imatrix"),
        ((CHECKPOINT, "--imatrix", "/nowhere"), "error: cannot read /nowhere: No such file"),
    ],
)
def test_errors_are_sentences(tmp_path: Path, args: tuple[str | Path, ...], says: str) -> None:
    run = convert(*args, "-o", tmp_path / "x.gguf")
    assert run.returncode == 1
    assert says in run.stderr
    assert run.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_output_folder_that_is_not_there(tmp_path: Path) -> None:
    run = convert(CHECKPOINT, "-o", tmp_path / "no" / "x.gguf")
    assert run.returncode == 1
    said = f"{tmp_path / 'no'} is not a folder; the output cannot be written there"
    assert run.stderr == f"error: {said}\n"


def test_output_that_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").mkdir()
    run = convert(CHECKPOINT, "-o", tmp_path / "x.gguf")
    assert run.returncode == 1
    assert "x.gguf is a folder" in run.stderr


def test_leftovers(tmp_path: Path) -> None:
    """A run that ended in the middle is neither lost nor mistaken for another."""
    out = tmp_path / "x.gguf"
    script = (
        "import sys; from pathlib import Path; from gguf_mtp.converters.convert import *;"
        "from gguf_mtp.demo import CHECKPOINT\n"
        "def stop(p):\n  if p.n_done > p.n_total // 2: raise KeyboardInterrupt\n"
        "try: convert(CHECKPOINT, Path(sys.argv[1]), ConvertOptions(), stop)\n"
        "except KeyboardInterrupt: pass\n"
    )
    subprocess.run([sys.executable, "-c", script, str(out)], check=True)
    refused = convert(CHECKPOINT, "-o", out, "--no-verify")
    assert refused.returncode == 1
    assert "--resume continues it, --force starts over" in refused.stderr
    other = convert(CHECKPOINT, "-o", out, "--no-verify", "--resume", "--type", "f16")
    assert "started from another checkpoint or with other options" in other.stderr
    resumed = convert(CHECKPOINT, "-o", out, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert "drafts accepted" in resumed.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["x.gguf"]


def broken(_: dict[str, Any], tensors: dict[str, tuple[Entry, bytes]]) -> None:
    """The block's last norm is zero: all its logits are, and it always drafts token 0."""
    entry, raw = tensors["model.layers.6.shared_head.norm.weight"]
    tensors[entry.name] = entry, bytes(len(raw))


def test_a_broken_block_is_reported(tmp_path: Path) -> None:
    run = convert(changed_demo(tmp_path, broken), "-o", tmp_path / "x.gguf")
    assert run.returncode == 1
    assert "its MTP block is broken: " in run.stderr
    assert "drafts, none accepted" in run.stderr
    assert (tmp_path / "x.gguf").exists()
    again = ("-o", tmp_path / "x.gguf", "--force", "--no-verify")
    assert convert(changed_demo(tmp_path, broken), *again).returncode == 0


def test_without_a_block(tmp_path: Path) -> None:
    run = convert(CHECKPOINT, "-o", tmp_path / "x.gguf", "--mtp", "drop")
    assert run.returncode == 0
    assert "MTP block: none" in run.stdout
    assert re.search(r"self-test: \d\d tokens decoded, no drafting", run.stdout)
    assert "and 75 more: the MTP block is left out (--mtp drop)" in run.stdout
