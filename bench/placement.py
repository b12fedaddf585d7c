"""Compares placements on this machine's devices: `python -m gguf_mtp.bench.placement`.

Every placement is loaded as planned and asked where its tensors went; the text of a strict F32
model is compared with the CPU's; then plain decoding and automatic drafting are timed on a widened
model. One table for people; the last line of standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf_mtp

from .. import LoadOptions, llama
from ..demo import demo_model
from ..gguf import model_facts
from ..offload import CPU
from ..offload.options import PlacementOptions
from ..params import SamplingParams
from .table import machine
from .widen import KINDS, widened_model

PROMPTS = ("The capital of France is", "An otter is", "def add(a, b):")
GREEDY = SamplingParams(temperature=0)


def ways(path: Path, workers: tuple[str, ...]) -> dict[str, PlacementOptions]:
    facts = model_facts.read(path)
    half = (facts.n_layer + facts.n_mtp + 1) // 2
    found = {
        "planned": PlacementOptions(),
        "-ngl 0": PlacementOptions(n_gpu_layers=0),
        f"-ngl {half}": PlacementOptions(n_gpu_layers=half),
        "-ngl -1": PlacementOptions(n_gpu_layers=-1),
        "--cpu-moe": PlacementOptions(cpu_moe=-1),
        "--draft-ngl 0": PlacementOptions(draft_ngl=0),
    }
    return {name: replace(way, rpc=workers) for name, way in found.items()}


def texts(path: Path, placement: PlacementOptions, n_tokens: int) -> tuple[list[list[int]], Any]:
    """Greedy tokens at strict settings, and where the model lay."""
    options = LoadOptions(n_ctx=512, strict=True, draft_min=2, draft_max=2, placement=placement)
    with gguf_mtp.load(path, options) as session:
        found = [
            [t for piece in session.complete(p, GREEDY, n_tokens) for t in piece.tokens]
            for p in PROMPTS
        ]
        return found, session.placement


def rate(
    path: Path, placement: PlacementOptions, draft: str, rounds: int, n_tokens: int
) -> list[float]:
    """Tokens a second of each round, the first not counted."""
    rates = []
    with gguf_mtp.load(path, LoadOptions(n_ctx=1024, draft=draft, placement=placement)) as session:
        for i in range(rounds + 1):
            start, n = time.perf_counter(), 0
            for prompt in PROMPTS:
                for piece in session.complete(prompt, GREEDY, n_tokens):
                    n += len(piece.tokens)
            if i:
                rates.append(n / (time.perf_counter() - start))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--widened", default="moe-q8_0,dense-bf16", help=", ".join(KINDS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-n", type=int, default=96, help="tokens per answer")
    parser.add_argument("--rpc", default="", help="workers as host:port, comma-separated")
    args = parser.parse_args()
    workers = tuple(part for part in args.rpc.split(",") if part)
    strict = demo_model(kind="f32")
    expected, _ = texts(strict, PlacementOptions(n_gpu_layers=0), args.n)
    print(f"{machine()}; devices {', '.join(llama.accelerators()) or 'none'} {args.rpc}")
    headings = ("same text", "as planned", "plain", "auto", "x plain")
    print(f"{'model':12} {'placement':14}" + "".join(f" {h:>10}" for h in headings))
    rows = []
    for name, way in ways(strict, workers).items():
        found, placement = texts(strict, way, args.n)
        same = sum(a == b for a, b in zip(found, expected, strict=True))
        planned = {(t.file, t.name): t.device for t in placement.plan.tensors}
        rows.append(
            {
                "placement": name,
                "same_texts": same,
                "as_planned": dict(placement.found) == planned,
                "on_devices": sum(d != CPU for d in planned.values()),
                "where": placement.lines()[0],
            }
        )
        print(f"{'demo f32':12} {name:14} {same:>8}/3 {rows[-1]['as_planned']!s:>10}")
    for kind in filter(None, args.widened.split(",")):
        path = widened_model(kind)
        for name, way in ways(path, workers).items():
            plain = rate(path, way, "off", args.rounds, args.n)
            auto = rate(path, way, "auto", args.rounds, args.n)
            a, b = statistics.median(plain), statistics.median(auto)
            rows.append({"model": kind, "placement": name, "plain": plain, "auto": auto})
            print(
                f"{kind:12} {name:14} {'':10} {'':10} {a:10.1f} {b:10.1f} {b / a:10.2f}", flush=True
            )
    print(json.dumps({"machine": machine(), "rows": rows}))


if __name__ == "__main__":
    main()
