"""Peak memory of a conversion does not follow the tensors: V3's sizes, measured as VmHWM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import V3, holes, layout, write

pytestmark = pytest.mark.native

SCRIPT = """
import re, sys
from pathlib import Path
from gguf_mtp.converters.convert import ConvertOptions, convert, plan
from gguf_mtp.converters.estimate import ram_bytes
options = ConvertOptions(sys.argv[3], n_threads=int(sys.argv[4]))
with plan(Path(sys.argv[1]), options) as job:
    estimated = ram_bytes(len(job.checkpoint.tensors), options.threads)
convert(Path(sys.argv[1]), Path(sys.argv[2]), options)
peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
print(int(peak[1]) * 1024, estimated)
"""


def measure(folder: Path, changes: dict[str, Any]) -> tuple[int, int]:
    """(peak, estimated) bytes of converting a trunk of holes to q4_0 in a process of its own."""
    config = V3 | changes | {"num_nextn_predict_layers": 0}
    after = f"model.layers.{config['num_hidden_layers']}."
    entries = [e for e in layout(config) if not e.name.startswith(after)]
    source = write(folder / "checkpoint", config, entries, holes, n_shards=4)
    out = folder / "out.gguf"
    command = [sys.executable, "-c", SCRIPT, str(source), str(out), "q4_0", "2"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    out.unlink()
    peak, estimated = map(int, run.stdout.split())
    print(f"peak {peak / 1e6:.0f} MB, estimated {estimated / 1e6:.0f} MB")
    return peak, estimated


needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no VmHWM here")


@needs_proc
def test_tensors_larger_than_the_memory_used(tmp_path: Path) -> None:
    """8 experts of V3's size are 470 MB as float32 in one tensor, 117 MB as FP8."""
    changes = {
        "num_hidden_layers": 2, "first_k_dense_replace": 1, "n_routed_experts": 8, "n_group": 4,
        "vocab_size": 16384, "intermediate_size": 2048, "num_attention_heads": 16,
    }  # fmt: skip
    peak, estimated = measure(tmp_path, changes)
    assert peak < 200e6
    assert 0.6 * estimated < peak < 1.3 * estimated


@needs_proc
@pytest.mark.slow
def test_one_layer_of_v3(tmp_path: Path) -> None:
    """256 experts of 2048 x 7168, FP8; embedding and head of 129,280 x 7,168: 16 GB of holes."""
    peak, estimated = measure(tmp_path, {"num_hidden_layers": 2, "first_k_dense_replace": 1})
    assert peak < 1.5e9
    assert 0.6 * estimated < peak < 1.3 * estimated
