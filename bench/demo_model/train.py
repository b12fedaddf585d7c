"""Train the demo model on the CPU.

    python -m bench.demo_model.train DATA.npy HELD.npy --out W.pt --minutes 46 [--init OLD.pt]

Without --init a fresh start: a plateau, then a cosine. With it, on other data, a cosine at once.
The weights are saved every ten minutes and at the end, so stopping early loses little.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from .model import LOSS_WEIGHTS, Config, DemoModel

CONFIG = Path(__file__).parents[2] / "gguf_mtp" / "demo" / "checkpoint" / "config.json"
SAVE_EVERY_S = 600.0
REPORT_EVERY = 100  # steps


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """How long and how fast. Training ends after `minutes` or `max_steps`, whichever is first."""

    minutes: float
    max_steps: int
    continues: bool
    n_batch: int = 4
    n_tokens: int = 512

    def progress(self, step: int, seconds: float) -> float:
        """From 0 to 1."""
        return max(step / self.max_steps, seconds / max(60 * self.minutes, 1e-9))

    def rate(self, step: int, progress: float) -> float:
        """The learning rate: a warm-up, then as the module says."""
        if self.continues:
            return 1.6e-3 * min(1, (step + 1) / 50) * _cosine(progress, floor=0.03)
        late = max(progress - 0.2, 0) / 0.8
        return 2.5e-3 * min(1, (step + 1) / 100) * _cosine(late, floor=0.04)


def _cosine(progress: float, floor: float) -> float:
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(progress, 1)))


def optimizer(model: nn.Module) -> torch.optim.AdamW:
    """AdamW; matrices decay, norms do not."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    groups = [
        {"params": [weight for weight in trained if weight.dim() >= 2], "weight_decay": 0.1},
        {"params": [weight for weight in trained if weight.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95))


def batches(data: Tensor, plan: TrainingPlan) -> Iterator[Tensor]:
    """Windows [n_batch, n_tokens + 3] from random places: the losses look three tokens ahead."""
    width = plan.n_tokens + len(LOSS_WEIGHTS)
    if len(data) <= width:
        raise ValueError(f"{len(data)} tokens are too few for windows of {width}")
    while True:
        starts = torch.randint(len(data) - width, (plan.n_batch,)).tolist()
        yield torch.stack([data[start : start + width] for start in starts])


def train(model: DemoModel, data: Tensor, plan: TrainingPlan, out: Path) -> None:
    """Train in place; prints the losses and the speed, and saves to `out` on the way."""
    model.train()
    adam, start, saved = optimizer(model), time.monotonic(), 0.0
    for step, ids in enumerate(batches(data, plan)):
        seconds = time.monotonic() - start
        progress = plan.progress(step, seconds)
        if progress >= 1:
            return
        for group in adam.param_groups:
            group["lr"] = plan.rate(step, progress)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = model.losses(ids)
        total = torch.stack([w * loss for w, loss in zip(LOSS_WEIGHTS, losses, strict=True)]).sum()
        total.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad(set_to_none=True)
        if step % REPORT_EVERY == REPORT_EVERY - 1:
            speed = (step + 1) * plan.n_batch * plan.n_tokens / (time.monotonic() - start)
            values = " ".join(f"{loss.item():.3f}" for loss in losses)
            print(f"step {step + 1}, {seconds / 60:.1f} min: {values}, {speed:.0f} tokens/s")
        if seconds - saved > SAVE_EVERY_S:
            saved = seconds
            save(model, out)


@torch.no_grad()
def held_out_losses(model: DemoModel, data: Tensor, plan: TrainingPlan) -> list[float]:
    """Mean losses over the held-out text, in windows that do not overlap."""
    model.eval()
    width = plan.n_tokens + len(LOSS_WEIGHTS)
    starts = range(0, max(len(data) - width, 1), plan.n_tokens)
    rows = [
        [loss.item() for loss in model.losses(data[None, start : start + width])]
        for start in starts
    ]
    means: list[float] = np.mean(rows, axis=0).tolist()
    return means


def save(model: nn.Module, path: Path) -> None:
    """Write the weights whole or not at all."""
    part = path.with_suffix(".part")
    torch.save(model.state_dict(), part)
    part.replace(path)


def load_ids(path: Path) -> Tensor:
    return torch.from_numpy(np.load(path).astype(np.int64))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("held", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--max-steps", type=int, default=1 << 60)
    parser.add_argument("--init", type=Path, help="weights to continue from")
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    model = DemoModel(Config.load(args.config))
    if args.init:
        model.load_state_dict(torch.load(args.init))
    plan = TrainingPlan(args.minutes, args.max_steps, continues=args.init is not None)
    n_weights = sum(weight.numel() for weight in model.parameters())
    print(f"{n_weights / 1e6:.1f} M parameters, {args.threads} threads")
    train(model, load_ids(args.data), plan, args.out)
    save(model, args.out)
    means = " ".join(f"{loss:.3f}" for loss in held_out_losses(model, load_ids(args.held), plan))
    print(f"held out: {means} (next token, MTP depth 1, depth 2)")


if __name__ == "__main__":
    main()
