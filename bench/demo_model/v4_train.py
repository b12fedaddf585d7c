"""Train the tiny DeepSeek-V4 on the CPU: the trunk with its MTP block, then DSpark's stages.

    python -m bench.demo_model.v4_train DATA.npy HELD.npy --out W.pt --minutes 48 \
        --dspark-minutes 18

DSpark learns from the finished trunk, which no longer changes. With --init and --minutes 0 it alone
is trained further.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from .train import REPORT_EVERY, SAVE_EVERY_S, TrainingPlan, batches, load_ids, optimizer, save
from .v4_model import LOSS_WEIGHTS, Config, V4Model

DSPARK_WEIGHTS = (1.0, 0.3)  # the block's tokens, and the confidence in each


def fit(
    model: nn.Module,
    trained: nn.Module,
    losses: Callable[[Tensor], Sequence[Tensor]],
    weights: tuple[float, ...],
    data: Tensor,
    plan: TrainingPlan,
    out: Path,
) -> None:
    """Train `trained`, a part of `model`, in place; saves the whole to `out` on the way."""
    model.eval()  # routers of the rest keep their balance
    trained.train()
    adam, start, saved = optimizer(trained), time.monotonic(), 0.0
    for step, ids in enumerate(batches(data, plan)):
        seconds = time.monotonic() - start
        progress = plan.progress(step, seconds)
        if progress >= 1:
            return
        for group in adam.param_groups:
            group["lr"] = plan.rate(step, progress)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = losses(ids)
        torch.stack([w * loss for w, loss in zip(weights, found, strict=True)]).sum().backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        adam.step()
        adam.zero_grad(set_to_none=True)
        if step % REPORT_EVERY == REPORT_EVERY - 1:
            values = " ".join(f"{loss.item():.3f}" for loss in found)
            print(f"step {step + 1}, {seconds / 60:.1f} min: {values}", flush=True)
        if seconds - saved > SAVE_EVERY_S:
            saved = seconds
            save(model, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("held", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--dspark-minutes", type=float, required=True)
    parser.add_argument("--init", type=Path, help="weights to continue from")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    model = V4Model(Config.load())
    if args.init:
        model.load_state_dict(torch.load(args.init))
    data = load_ids(args.data)
    trunk_and_block = nn.ModuleList([model.trunk, model.mtp])
    plan = TrainingPlan(args.minutes, 1 << 60, continues=args.init is not None, n_tokens=256)
    fit(model, trunk_and_block, model.losses, LOSS_WEIGHTS, data, plan, args.out)
    trunk_and_block.requires_grad_(False)
    plan = TrainingPlan(args.dspark_minutes, 1 << 60, continues=False, n_tokens=256)
    fit(model, model.dspark, model.block_losses, DSPARK_WEIGHTS, data, plan, args.out)
    save(model, args.out)
    model.eval()
    held = load_ids(args.held)
    with torch.no_grad():
        rows = [
            [loss.item() for loss in (*model.losses(ids), *model.block_losses(ids))]
            for ids in (held[None, at : at + 259] for at in range(0, len(held) - 259, 256))
        ]
    means = " ".join(f"{value:.3f}" for value in torch.tensor(rows).mean(0).tolist())
    print(f"held out: {means} (next token, MTP depth 1, depth 2, DSpark's block, its confidence)")


if __name__ == "__main__":
    main()
