"""DeepSeek-V3 itself, 91,991 tensors in 163 shards, as holes: 689 GB that take 22 MB."""

from __future__ import annotations

import ctypes
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import llama_cpp as L
import pytest

from gguf_mtp.converters.checkpoint import Checkpoint
from gguf_mtp.converters.convert import ConvertOptions, plan
from gguf_mtp.converters.families import deepseek_v3
from gguf_mtp.converters.mla import Choices, adapt
from gguf_mtp.converters.recipes import RECIPES, QuantOptions, choose
from gguf_mtp.converters.tensors import Adapted
from tests.support.checkpoints import V3, Entry, holes, layout, write

pytestmark = pytest.mark.native

MTP = "blk.61."
SHARP = {"q8_0", "f16", "bf16", "f32"}
EXPERTS = {"q4_k", "q5_0", "q5_1", "q5_k", "q6_k"}


@L.llama_log_callback
def _silence(_level: int, _text: bytes, _user: Any) -> None:
    """llama.cpp goes on calling what it was last given."""


@pytest.fixture(scope="module")
def v3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("v3"), V3, layout(V3), holes, n_shards=163)


def n_weights(entry: Entry) -> int:
    return math.prod(entry.shape)


def is_kept(entry: Entry) -> bool:
    copies = ("61.embed_tokens.weight", "shared_head.head.weight")
    return not entry.name.endswith(("scale_inv", *copies))


def stays_f32(entry: Entry) -> bool:
    return len(entry.shape) == 1 or entry.name.endswith("mlp.gate.weight")


def test_dry_run_of_all_of_v3(v3: Path) -> None:
    """In its own process, whose peak memory is looked at."""
    script = f"""
import re
from pathlib import Path
from typer.testing import CliRunner
import typer
from gguf_mtp.cli.convert import convert
app = typer.Typer()
app.command()(convert)
result = CliRunner().invoke(app, [{str(v3)!r}, "-o", {str(v3 / "out.gguf")!r}, "--dry-run"])
assert result.exit_code == 0, result.output
print(result.output)
# ru_maxrss of a child begins with its parent's size; VmHWM does not.
peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
print("measured", int(peak[1]) * 1024)
"""
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    lines = run.stdout.splitlines()
    _, memory = lines[-1].split()
    assert int(memory) < 500e6

    q8_0 = sum(n_weights(e) // 32 * 34 for e in layout(V3) if is_kept(e) and not stays_f32(e))
    f32 = sum(n_weights(e) * 4 for e in layout(V3) if is_kept(e) and stays_f32(e))
    text = run.stdout
    assert f"would have 1,108 tensors: Q8_0 {q8_0:,} bytes, F32 {f32:,} bytes" in text
    merged = sum(
        e.name.endswith("scale_inv") or ".experts." in e.name or "kv_b_proj" in e.name
        for e in layout(V3)
    )
    written = 91_991 - merged - 2
    assert f"91,991 read = {written:,} written + {merged:,} merged + 2 dropped" in text
    assert "688,574,839,360 bytes" in text
    rows = [line for line in lines if re.match(r"(blk\.\d+|token_embd|output)[._]", line)]
    assert len(rows) == 1108
    assert sum(int(line.split()[3].replace(",", "")) for line in rows) == q8_0 + f32
    assert not (v3 / "out.gguf").exists()


@pytest.fixture(scope="module")
def adapted(v3: Path) -> Adapted:
    with Checkpoint(v3) as checkpoint:
        return adapt(checkpoint, Choices(), family=deepseek_v3.FAMILY)


@pytest.fixture(scope="module")
def f32_header(v3: Path) -> Path:
    """Our F32 file of V3, 2.7 TB of it a hole: enough for llama-quantize to choose types."""
    with plan(v3, ConvertOptions("f32")) as job:
        out = v3 / "f32.gguf"
        with out.open("wb") as file:
            file.write(job.shards[0].header)
            file.truncate(job.n_bytes)
        return out


def llama_quantize_types(f32: Path, file_type: int) -> dict[str, str]:
    """What a dry run of llama-quantize's code logs: name, and the type that it would have."""
    lines: list[str] = []

    @L.llama_log_callback
    def keep(_level: int, text: bytes, _user: Any) -> None:
        lines.append(text.decode(errors="replace"))

    L.llama_log_set(keep, ctypes.c_void_p(0))
    params = L.llama_model_quantize_default_params()
    params.ftype, params.dry_run = file_type, True
    code = L.llama_model_quantize(str(f32).encode(), str(f32.with_suffix(".no")).encode(), params)
    L.llama_log_set(_silence, ctypes.c_void_p(0))
    assert code == 0
    row = re.compile(
        r"\[ *\d+/ *\d+\] (\S+) +- \[[^]]*\], type = +f32, size = [^(\n]*(?:\((\w+)\))?"
    )
    return {m[1]: (m[2] or "f32").lower() for m in row.finditer("".join(lines))}


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_types_of_the_trunk_are_llama_quantizes(
    adapted: Adapted, f32_header: Path, recipe: str
) -> None:
    choice = choose(adapted, QuantOptions(RECIPES[recipe]))
    names = [t.name for t in adapted.tensors]
    ours = dict(zip(names, (t.name.lower() for t in choice.types), strict=True))
    theirs = llama_quantize_types(f32_header, RECIPES[recipe].file_type)
    assert ours.keys() == theirs.keys()
    different = {n: (t, theirs[n]) for n, t in ours.items() if t != theirs[n]}
    assert {n: d for n, d in different.items() if not n.startswith(MTP)} == {}
    for name, type_ in ours.items():
        if name.startswith(MTP):
            assert type_ in SHARP | (EXPERTS if "_exps" in name else set()), name
