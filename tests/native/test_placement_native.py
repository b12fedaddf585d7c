"""Placement on real second devices: RPC workers on loopback, each with a set amount of memory.

What is asserted of each placement: llama.cpp put every tensor where the plan says, took the memory
that the plan reckoned with, and writes the same text with the same drafts accepted.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

import gguf_mtp
from gguf_mtp import LoadOptions
from gguf_mtp.bench.synthetic import V3, holes, layout, write
from gguf_mtp.converters.convert import ConvertOptions, convert
from gguf_mtp.converters.convert import plan as plan_conversion
from gguf_mtp.demo import CHECKPOINT, demo_model
from gguf_mtp.errors import LoadFailed, RequestError
from gguf_mtp.gguf import model_facts
from gguf_mtp.gguf.bytes_per_token import is_routed
from gguf_mtp.llama import Model, connect
from gguf_mtp.offload import CPU, Device, Machine, Subject, fit
from gguf_mtp.offload.manual import ByHand, manual
from gguf_mtp.offload.options import PlacementOptions
from gguf_mtp.params import SamplingParams
from gguf_mtp.placement import context_size
from gguf_mtp.placement.checked_plan import (
    ActualPlacement,
    _ask,
    block_options,
    plan_placement,
    target_options,
)
from tests.support.worlds import MIB, Worker, workers

pytestmark = pytest.mark.native

PROMPTS = ("The capital of France is", "An otter is", "def add(a, b):")
GREEDY = SamplingParams(temperature=0)
ROOM = 400 * MIB


@pytest.fixture(scope="module")
def path() -> Path:
    return demo_model(kind="f32")


@pytest.fixture(scope="module")
def lent() -> Iterator[list[Worker]]:
    with workers(ROOM, ROOM) as running:
        yield running


Answers = tuple[list[tuple[list[int], int, int]], ActualPlacement]


def answers(path: Path, placement: PlacementOptions) -> Answers:
    """Tokens, drafted and accepted for each prompt, strict, two draft tokens a round."""
    options = LoadOptions(n_ctx=256, strict=True, draft_min=2, draft_max=2, placement=placement)
    out = []
    with gguf_mtp.load(path, options) as session:
        for prompt in PROMPTS:
            pieces = list(session.complete(prompt, GREEDY, 32))
            stats = pieces[-1].stats
            assert stats is not None
            tokens = [t for piece in pieces for t in piece.tokens]
            out.append((tokens, stats.drafted, stats.accepted))
        assert session.placement is not None
        placement = session.placement
    assert isinstance(placement, ActualPlacement)
    return out, placement


@pytest.fixture(scope="module")
def on_cpu(path: Path) -> list[tuple[list[int], int, int]]:
    found, placement = answers(path, PlacementOptions())
    assert placement.plan.is_on_cpu
    assert sum(accepted for _, _, accepted in found) > 10
    return found


def one(worker: Worker, **wishes: object) -> PlacementOptions:
    return replace(PlacementOptions(rpc=(worker.endpoint,), margin=0), **wishes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wishes",
    [
        {},
        {"n_gpu_layers": 0},
        {"n_gpu_layers": 4},
        {"n_gpu_layers": -1},
        {"cpu_moe": -1},
        {"n_gpu_layers": 3, "cpu_moe": 5},
        {"draft_ngl": 0},
        {"kv_offload": False},
        {"cpu_moe": -1, "load_mode": "none"},
        {"overrides": ((r"blk\.2\..*_exps", CPU), (r"attn_output", CPU))},
    ],
    ids=str,
)
def test_text_and_drafts_do_not_depend_on_the_place(
    path: Path,
    lent: list[Worker],
    on_cpu: list[tuple[list[int], int, int]],
    wishes: dict[str, object],
) -> None:
    found, placement = answers(path, one(lent[0], **wishes))
    planned = {(t.file, t.name): t.device for t in placement.plan.tensors}
    assert dict(placement.found) == planned  # tensor by tensor
    assert ("RPC0" in planned.values()) == (wishes != {"n_gpu_layers": 0})
    assert placement.is_checked == (wishes != {"n_gpu_layers": 0})
    assert found == on_cpu


def test_the_block_on_one_device_and_the_trunk_on_the_other(
    path: Path, lent: list[Worker], on_cpu: list[tuple[list[int], int, int]]
) -> None:
    n_layer = model_facts.read(path).n_layer
    both = PlacementOptions(
        rpc=tuple(w.endpoint for w in lent), margin=0, split=(float(n_layer), 2.0)
    )
    found, placement = answers(path, both)
    assert set(placement.plan.layers[:-1]) == {"RPC0"}
    assert placement.plan.layers[-1] == "RPC1"
    assert dict(placement.found) == {(t.file, t.name): t.device for t in placement.plan.tensors}
    assert found == on_cpu


def test_two_devices_share_the_layers_by_plan(
    path: Path, lent: list[Worker], on_cpu: list[tuple[list[int], int, int]]
) -> None:
    found, placement = answers(
        path, PlacementOptions(rpc=tuple(w.endpoint for w in lent), margin=0)
    )
    assert set(placement.plan.layers) == {"RPC0", "RPC1"}
    assert dict(placement.found) == {(t.file, t.name): t.device for t in placement.plan.tensors}
    assert found == on_cpu


@pytest.mark.parametrize("wishes", [{}, {"n_gpu_layers": -1}, {"draft_ngl": 0}], ids=str)
def test_a_side_file_lies_as_planned(
    tmp_path: Path,
    lent: list[Worker],
    on_cpu: list[tuple[list[int], int, int]],
    wishes: dict[str, object],
) -> None:
    """The MTP block in a file of its own, found beside its trunk."""
    trunk, side = tmp_path / "trunk.gguf", tmp_path / "mtp-trunk.gguf"
    convert(CHECKPOINT, trunk, ConvertOptions("f32", mtp="drop"))
    convert(CHECKPOINT, side, ConvertOptions("f32", mtp="only"))
    found, placement = answers(trunk, one(lent[0], **wishes))
    planned = {(t.file, t.name): t.device for t in placement.plan.tensors}
    assert placement.is_checked
    assert dict(placement.found) == planned
    block = {d for (file, name), d in planned.items() if file == str(side) and "nextn" in name}
    assert block == ({CPU} if wishes == {"draft_ngl": 0} else {"RPC0"})
    assert found == on_cpu


def subject(path: Path) -> Subject:
    return Subject(model_facts.read(path), context_size.contexts(2048, 1, 4, True))


@pytest.mark.parametrize("wishes", [{}, {"n_gpu_layers": 4}, {"cpu_moe": -1}], ids=str)
def test_memory_is_as_planned(path: Path, lent: list[Worker], wishes: dict[str, object]) -> None:
    """What llama.cpp says after loading, against the plan that was checked and the one that was
    only reckoned."""
    settled = plan_placement(subject(path), one(lent[0], **wishes))
    assert settled.is_checked
    plan = settled.plan
    with ExitStack() as stack:
        connect(lent[0].endpoint)
        model = stack.enter_context(Model(str(path), settled.model_options(load_mtp=True)))
        target = model.context(target_options(plan.contexts, 1, hidden=True)).memory()
        block = model.context(block_options(plan, 1)).memory()
    used = sum(target["RPC0"]) + block["RPC0"].context + block["RPC0"].compute
    assert plan.used("RPC0") == pytest.approx(used, rel=0.01)
    assert plan.weights("RPC0") == pytest.approx(target["RPC0"].model, rel=0.001)
    assert plan.cache("RPC0") == target["RPC0"].context + block["RPC0"].context
    where = Machine(plan.devices)
    hand = settled.options.hand
    reckoned = fit(settled.subject, where) if hand.is_empty else manual(subject(path), where, hand)
    assert reckoned.layers == plan.layers
    # Of a model this small most is buffers, which are reckoned a little too large.
    assert 0.98 * used < reckoned.used("RPC0") < 1.35 * used


def test_a_plan_by_hand_that_is_too_large_is_refused_before_loading(path: Path) -> None:
    with workers(12 * MIB) as (small,):
        with pytest.raises(
            LoadFailed, match=r"puts [\d.]+ MiB on RPC\d, which has 12.0 MiB available"
        ):
            gguf_mtp.load(path, LoadOptions(n_ctx=256, placement=one(small, n_gpu_layers=-1)))
        settled = plan_placement(subject(path), one(small))
        assert not settled.plan.over_budget()


def test_a_plan_that_llama_cpp_finds_too_large_is_made_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With estimates of buffers far too small, the check against llama.cpp is what keeps the
    budget."""
    from gguf_mtp.offload import buffers

    honest = buffers._compute
    monkeypatch.setattr(buffers, "_compute", lambda *a: tuple(n // 1000 for n in honest(*a)))
    with workers(34 * MIB) as (small,):
        settled = plan_placement(subject(path), one(small))
        assert settled.is_checked
        assert not settled.plan.over_budget()
        experts = [t for t in settled.plan.tensors if is_routed(t.name) and t.device == CPU]
        assert experts  # it does not fit whole


def test_a_device_that_gets_nothing_is_said(
    path: Path, lent: list[Worker], caplog: pytest.LogCaptureFixture
) -> None:
    settled = plan_placement(subject(path), replace(one(lent[0]), margin=1 << 30))
    assert settled.plan.is_on_cpu
    (said,) = caplog.messages
    assert re.match(r"nothing is placed on RPC\d: of 3\d\d\.\d MiB free, .* reserves 1\.0", said)


def test_keys_and_values_of_mla_have_one_type(path: Path) -> None:
    with pytest.raises(RequestError, match="must be equal"):
        gguf_mtp.load(path, LoadOptions(placement=PlacementOptions(cache_k="q8_0")))


def test_a_cache_of_eight_bits_is_half_as_large(path: Path) -> None:
    settled = plan_placement(subject(path), PlacementOptions(cache_k="q8_0", cache_v="q8_0"))
    plan = settled.plan
    with Model(str(path), settled.model_options(load_mtp=True)) as model:
        target = model.context(target_options(plan.contexts, 1, hidden=True)).memory()
        block = model.context(block_options(plan, 1)).memory()
    assert plan.cache(CPU) == target[CPU].context + block[CPU].context
    assert (
        plan.caches[0] * 64 == plan_placement(subject(path), PlacementOptions()).plan.caches[0] * 34
    )


def test_v3_itself_is_reckoned_within_five_percent(tmp_path: Path, lent: list[Worker]) -> None:
    """All of DeepSeek-V3 at q4_k_m, 411 GB of it a hole, asked of llama.cpp by `no_alloc`: the pure
    plan's memory on the device, and its cache and buffers alone."""
    folder = write(tmp_path / "v3", V3, layout(V3), holes, n_shards=8)
    out = tmp_path / "v3.gguf"
    with plan_conversion(folder, ConvertOptions("q4_k_m")) as job, out.open("wb") as file:
        file.write(job.shards[0].header)
        file.truncate(job.n_bytes)
    with pytest.raises(LoadFailed, match="every token would wait for the disk"):
        gguf_mtp.load(out)
    what = Subject(model_facts.read(out), context_size.contexts(32768, 1, 4, True))
    for hand in (ByHand(-1, cpu_moe=-1), ByHand(-1, cpu_moe=57), ByHand(20)):
        device = Device("RPC0", 10**13, copies_experts=False)
        plan = manual(what, Machine((device,)), hand)
        found = _ask(plan, what, [lent[0].endpoint])
        assert found is not None
        weights, cache, buffers = found["RPC0"]
        assert plan.weights("RPC0") == pytest.approx(weights, rel=1e-4)
        assert plan.cache("RPC0") == cache
        assert 0.95 * buffers < plan.compute["RPC0"] < 1.35 * buffers
        assert plan.used("RPC0") == pytest.approx(sum(found["RPC0"]), rel=0.05)


@pytest.mark.parametrize(
    ("placement", "says"),
    [
        (PlacementOptions(main_gpu=3), "--main-gpu 3: there are 0 devices"),
        (
            PlacementOptions(devices=("CUDA0",)),
            "--device CUDA0 does not exist; available: only the CPU",
        ),
        (PlacementOptions(overrides=(("exps", "CUDA0"),)), "exps=CUDA0 does not name a device"),
        (PlacementOptions(split=(1.0, 1.0)), "has 2 shares, but the devices are none"),
    ],
)
def test_devices_that_are_not_there(path: Path, placement: PlacementOptions, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        plan_placement(subject(path), placement)


def test_a_model_without_a_plan_asks_no_lost_worker() -> None:
    """In a process that knew a worker: llama.cpp asks every device for its memory by itself."""
    code = (
        "import sys\n"
        "from gguf_mtp.llama import Model, connect\n"
        "connect(sys.argv[1]); print('connected', flush=True); sys.stdin.readline()\n"
        "Model(sys.argv[2]).close(); print('loaded')\n"
    )
    with workers(ROOM) as [worker]:
        child = subprocess.Popen(
            [sys.executable, "-c", code, worker.endpoint, str(demo_model())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout
        assert child.stdout.readline() == "connected\n"
    assert child.communicate("on\n", timeout=60)[0] == "loaded\n"
