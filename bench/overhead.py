"""What Python costs around the decodes: microseconds per round, sampling included.

    python -m gguf_mtp.bench.overhead

On the demo model (4,096 entries) the decodes' own time is subtracted from the wall time. For a
large vocabulary the decodes are played by arrays, so that nothing but Python is left.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..demo import demo_model
from ..depth import FixedDepth
from ..drafters.mtp import MtpDrafter
from ..engine.config import EngineLimits
from ..engine.engine import Engine
from ..loading.loader import LoadOptions, load
from ..params import SamplingParams
from ..types import Decoder, Output, Rows, Step
from .workloads import workload

N_VOCAB, N_EMBD = 129_280, 7_168


class Cost(NamedTuple):
    """Median and minimum over answers, microseconds per round; a round has `n_rows` target rows."""

    median: float
    least: float
    n_rows: int


class Timed:
    """A decoder that adds up the seconds its decodes took."""

    def __init__(self, inner: Decoder) -> None:
        self._inner = inner
        self.seconds = 0.0
        self.n_past, self.rewind = inner.n_past, inner.rewind
        self.copy, self.save, self.load = inner.copy, inner.save, inner.load

    def decode(self, rows: Sequence[Rows]) -> Step:
        step = self._inner.decode(rows)
        self.seconds += step.seconds
        return step


class Arrays:
    """A decoder without a model for one sequence: logits and hidden rows are slices of noise.

    Row p has the same logits in the target and in the drafter, so drafts are as good as can be.
    """

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self._n_past = 0
        self._logits = (3 * rng.standard_normal((64, N_VOCAB))).astype(np.float32)
        self._hidden = rng.standard_normal((64, N_EMBD)).astype(np.float32)

    def n_past(self, _seq: int) -> int:
        return self._n_past

    def decode(self, rows: Sequence[Rows]) -> Step:
        outputs = []
        start = time.perf_counter()
        for r in rows:
            n = len(r.tokens)
            first = (r.pos + n - r.n_outputs) % 32
            logits = self._logits[first : first + r.n_outputs]
            outputs.append(Output(logits, self._hidden[:n]))
            self._n_past = r.pos + n
        return Step(outputs, time.perf_counter() - start)

    def rewind(self, _seq: int, n_past: int) -> None:
        self._n_past = min(self._n_past, n_past)

    def copy(self, src: int, dst: int, n_past: int) -> None:
        raise NotImplementedError

    def save(self, seq: int) -> bytes:
        raise NotImplementedError

    def load(self, seq: int, data: bytes) -> int:
        raise NotImplementedError


def on_the_demo(depth: int, temperature: float, n_answers: int = 30) -> Cost:
    """Around the real library's decodes, 4,096 entries."""
    options = LoadOptions(
        n_ctx=512, draft="off" if depth == 0 else "mtp", draft_min=depth, draft_max=depth
    )
    with load(demo_model(), options) as session:
        engine = session.engine
        prompts = workload("facts", session).prompts[:n_answers]
        engine._target = engine._slots._target = Timed(engine._target)
        timed: list[Decoder] = [engine._target]
        mtp = engine.drafting.drafter("mtp")
        if isinstance(mtp, MtpDrafter):
            mtp._context = Timed(mtp._context)
            timed.append(mtp._context)
        return _cost(engine, timed, prompts, temperature, depth)


def on_arrays(depth: int, temperature: float, n_answers: int = 10) -> Cost:
    """129,280 entries and hidden rows of 7,168, the sizes of DeepSeek-V3."""
    target = Timed(Arrays())
    mtp = Timed(Arrays())
    limits = EngineLimits(n_ctx=4096, n_seq=1, n_batch=512, end_tokens=frozenset())
    engine = Engine(target, [MtpDrafter(mtp, 1, 512)], FixedDepth(depth), limits)
    prompts = [[i, i + 1, i + 2] for i in range(n_answers)]
    return _cost(engine, [target, mtp], prompts, temperature, depth)


def _cost(
    engine: Engine,
    timed: Sequence[Decoder],
    prompts: Sequence[Sequence[int]],
    temperature: float,
    depth: int,
) -> Cost:
    costs = []
    params = SamplingParams(temperature=temperature, seed=1)
    decoders = [t for t in timed if isinstance(t, Timed)]
    for prompt in prompts:
        before = sum(t.seconds for t in decoders)
        start = time.perf_counter()
        n_rounds = sum(1 for chunk in engine.generate([prompt], params, 100))
        wall = time.perf_counter() - start
        costs.append(1e6 * (wall - sum(t.seconds for t in decoders) + before) / n_rounds)
    return Cost(statistics.median(costs[1:]), min(costs[1:]), depth + 1)


def main() -> None:
    print("vocabulary  temperature  depth  rows  us/round (median)    (min)")
    for n_vocab, measure in ((4096, on_the_demo), (N_VOCAB, on_arrays)):
        for temperature in (0.0, 0.7):
            for depth in (0, 1, 2, 3):
                cost = measure(depth, temperature)
                print(
                    f"{n_vocab:10}  {temperature:11}  {depth:5}  {cost.n_rows:4}  "
                    f"{cost.median:17.0f}  {cost.least:7.0f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
