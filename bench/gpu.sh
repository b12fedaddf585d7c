#!/usr/bin/env bash
# What a GPU makes of it, in under 8 minutes on one card: placements (-ngl 0, half, all, experts on
# the CPU), exactness, plain decoding against automatic drafting on widened models; one table.
#
#   make cuda && bench/gpu.sh [OUT]      OUT: folder for the JSON document; the current one without
#
# PYTHON names the interpreter with gguf-mtp in it, .venv's by default. Without a card it says so
# and exits 1.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-.}
python=${PYTHON:-.venv/bin/python}
[ "${python#/}" = "$python" ] && [ -e "$python" ] && python=$PWD/$python

nvidia-smi --query-gpu=name,memory.total,memory.free,driver_version --format=csv || {
    echo "bench/gpu.sh needs an NVIDIA card" >&2
    exit 1
}
"$python" - <<'PY'
from gguf_mtp import llama
names = llama.accelerators()
if not any(name.startswith("CUDA") for name in names):
    raise SystemExit(f"llama.cpp sees no CUDA device (it sees {names or 'the CPU alone'}): make cuda")
PY
start=$SECONDS
timeout 420 "$python" -m gguf_mtp.bench.placement "${@:2}" | tee "$out/gpu.txt"
tail -n 1 "$out/gpu.txt" >"$out/gpu.json"
echo "$((SECONDS - start)) s"
