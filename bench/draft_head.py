"""Does a separate low-bit head make the MTP block draft faster? Bytes, time, acceptance.

    python -m gguf_mtp.bench.draft_head FOLDER [--threads N]

Time is measured on a synthetic model with DeepSeek-V3's vocabulary and its proportion of head to
active block (random weights; one draft step reads about 0.6 times the head besides it), acceptance
on the demo model. Variants take turns, so that a busy machine slows all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..converters.convert import ConvertOptions, convert
from ..demo import CHECKPOINT
from ..gguf.model_facts import read
from ..llama import Context, ContextOptions, Model, ModelOptions
from ..loading.loader import LoadOptions, load
from ..params import SamplingParams
from ..types import ModelFacts, Rows
from .synthetic import V3, Entry, layout, write

HEADS = (None, "q8_0", "q6_k", "q4_k", "q4_0")
CONFIG = V3 | {
    "hidden_size": 1024,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 512,
    "intermediate_size": 2048,
    "moe_intermediate_size": 3072,
    "n_routed_experts": 16,
    "num_experts_per_tok": 8,
    "n_group": 4,
    "topk_group": 2,
}
N_STEPS, N_TURNS = 12, 8
N_PROMPTS, N_TOKENS = 24, 60


class Variant(NamedTuple):
    """`seconds` is the median of a draft step, `n_bytes` what it reads of weights."""

    head: str
    n_bytes: int
    seconds: float
    accepted: int
    drafted: int


def fill(entry: Entry) -> bytes:
    """Random weights of a trained model's size; equal shapes get equal bytes."""
    rng = np.random.default_rng(entry.shape)
    n = min(entry.n_bytes, 1 << 20)
    if entry.dtype == "F8_E4M3":
        raw = rng.integers(0, 0x30, n, np.uint8) | rng.integers(0, 2, n, np.uint8) << 7
    elif entry.dtype == "F32":
        raw = np.full(n // 4, 0.01, np.float32).view(np.uint8)
    else:
        values = 0.03 * rng.standard_normal(n // 2, np.float32) + ("norm" in entry.name)
        raw = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return np.resize(raw, entry.n_bytes).tobytes()


def step_bytes(facts: ModelFacts) -> int:
    """Bytes of weights that one draft step reads: the block with its used experts, and a head."""
    block, total = f"blk.{facts.n_layer}.", 0.0
    own = f"{block}nextn.shared_head_head.weight"
    head = own if any(t.name == own for t in facts.tensors) else "output.weight"
    for tensor in facts.tensors:
        if tensor.name == head or (tensor.name.startswith(block) and tensor.name != own):
            share = facts.n_expert_used / facts.n_expert if "_exps." in tensor.name else 1
            total += tensor.n_bytes * share
    return int(total)


def timed(contexts: list[Context]) -> list[float]:
    """The median seconds of a one-row draft step, the contexts taking turns."""
    hidden = np.random.default_rng(0).standard_normal((1, CONFIG["hidden_size"])).astype(np.float32)
    times: list[list[float]] = [[] for _ in contexts]
    for _ in range(N_TURNS):
        for context, seconds in zip(contexts, times, strict=True):
            context.rewind(0, 0)
            for i in range(N_STEPS):
                step = context.decode([Rows(0, i + 1, [5 + i], 1, hidden)])
                if i > 1:  # the first ones build the graph and warm the cache
                    seconds.append(step.seconds)
    return [statistics.median(t) for t in times]


def acceptance(path: Path, n_threads: int) -> tuple[int, int]:
    """Accepted and drafted tokens at depth 1, greedy, over held-out prompts."""
    prompts = json.loads(
        (Path(__file__).parent / "prompts" / "held_out.json").read_text(encoding="utf-8")
    )
    accepted = drafted = 0
    options = LoadOptions(n_ctx=512, draft_min=1, draft_max=1, n_threads=n_threads)
    with load(path, options) as session:
        for prompt in prompts[:N_PROMPTS]:
            asked = session.chat_tokens([{"role": "user", "content": prompt}])
            for chunk in session.engine.generate([asked], SamplingParams(temperature=0), N_TOKENS):
                if chunk.stats:
                    accepted += chunk.stats.accepted
                    drafted += chunk.stats.drafted
    return accepted, drafted


def measure(work: Path, n_threads: int) -> list[Variant]:
    source = write(work / "checkpoint", CONFIG, layout(CONFIG), fill)
    models, contexts, sizes, rates = [], [], [], []
    for head in HEADS:
        path = work / f"{head}.gguf"
        convert(source, path, ConvertOptions("q8_0", draft_head=head, n_threads=n_threads))
        sizes.append(step_bytes(read(path)))
        models.append(Model(str(path), ModelOptions(load_mtp=True)))
        options = ContextOptions(256, 1, 64, 1, n_threads, is_mtp=True)
        contexts.append(models[-1].context(options))
        demo = work / f"demo-{head}.gguf"
        convert(CHECKPOINT, demo, ConvertOptions("q8_0", draft_head=head, n_threads=n_threads))
        rates.append(acceptance(demo, n_threads))
    seconds = timed(contexts)
    for model in models:
        model.close()
    names = [head or "shared" for head in HEADS]
    return [
        Variant(n, size, s, *rate)
        for n, size, s, rate in zip(names, sizes, seconds, rates, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="Folder for 5 GB of temporary files.")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as work:
        variants = measure(Path(work), args.threads)
    print("head, MB per draft step, ms per draft step, of shared head, acceptance on the demo")
    for v in variants:
        print(
            f"{v.head:8} {v.n_bytes / 1e6:7.0f} {v.seconds * 1e3:7.1f} "
            f"{v.seconds / variants[0].seconds:6.2f}   {v.accepted}/{v.drafted} = "
            f"{v.accepted / v.drafted:.3f}"
        )


if __name__ == "__main__":
    main()
