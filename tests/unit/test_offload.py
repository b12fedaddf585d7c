"""Plans: what they may never do, in which order they fill devices, and the sums behind them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_mtp.gguf.bytes_per_token import expert_share, is_routed, layer_of
from gguf_mtp.offload import CPU, Device, Host, Machine, Subject, fit
from gguf_mtp.offload.directives import load_params
from gguf_mtp.offload.predict import ACCEPTANCE, predict, seconds
from tests.support.placements import (
    MIB,
    facts_of,
    llama_cpp_places,
    machine,
    machines,
    models,
    sizes,
    subject,
)


@settings(deadline=None, max_examples=300)
@given(models, machines)
def test_no_plan_is_over_budget(what: Subject, where: Machine) -> None:
    plan = fit(what, where)
    assert plan.over_budget() == []
    named = [(t.file, t.name) for t in plan.tensors if t.name != "output.weight"]
    expected = [(t.file, t.name) for t in what.tensors if t.name != "output.weight"]
    assert sorted(named) == sorted(expected)
    assert len(plan.layers) == what.n_layers
    places = [CPU, *(d.name for d in where.devices)]
    trunk = [places.index(device) for device in plan.layers[: plan.n_layer]]
    assert trunk == sorted(trunk)  # first layers with the CPU, then the devices in order


@settings(deadline=None, max_examples=300)
@given(models, machines)
def test_llama_cpp_s_rules_give_the_plan(what: Subject, where: Machine) -> None:
    """What llama.cpp makes of the directives is the plan, tensor by tensor and cache by cache."""
    plan = fit(what, where)
    n_blocks = what.facts.n_layer + what.facts.n_mtp
    places, layers, head = llama_cpp_places(load_params(plan, n_blocks), plan, n_blocks)
    assert places == {t.name: t.device for t in plan.tensors}
    if "output.weight" not in {t.name for t in what.facts.tensors} and plan.head != CPU:
        assert head == plan.head  # a tied output has no name of its own
    for i, device in enumerate(plan.layers[: plan.n_layer]):
        assert layers[i] == device


@settings(deadline=None, max_examples=100)
@given(models, sizes)
def test_a_part_waits_only_for_want_of_room(what: Subject, free: int) -> None:
    """On one device, in the order of worth: what is left out would not have fitted any more."""
    where = machine([free])
    plan = fit(what, where)
    places = {(t.file, t.name): t.device for t in plan.tensors}
    room = where.devices[0].budget - plan.used("GPU0")
    if room < 0 or plan.is_on_cpu:
        return
    for part in what.parts():
        device = places[part.tensors[0].file, part.tensors[0].name]
        if device == CPU and part.kind in ("experts", "dense"):
            assert part.n_bytes > room - 40 * MIB  # buffers may be set aside and not needed


def test_the_order_of_worth() -> None:
    """Device memory grows by a step: parts are whole on it in the order of what they are worth."""
    what = subject(n_layer=4, drafts=True, expert=30 * MIB, attention=4 * MIB)
    whole: dict[str, int] = {}
    for free in range(0, 400 * MIB, MIB):
        plan = fit(what, machine([free]))
        places = {t.name: t.device for t in plan.tensors}
        kinds = {part.kind for part in what.parts()}
        waiting = {p.kind for p in what.parts() if places[p.tensors[0].name] == CPU}
        for kind in kinds - waiting:
            whole.setdefault(kind, free)
    assert whole["block"] < whole["attention"] < whole["head"] < whole["block experts"]
    assert whole["block experts"] < whole["experts"]


def test_experts_follow_their_attention_over_devices() -> None:
    what = subject(n_layer=8, drafts=False, expert=20 * MIB, attention=4 * MIB)
    plan = fit(what, machine([120 * MIB, 120 * MIB]))
    assert set(plan.layers) == {"GPU0", "GPU1"}
    assert 2 <= plan.layers.count("GPU0") <= 6
    beside = [
        t.device == plan.layers[layer_of(t.name) or 0]
        for t in plan.tensors
        if is_routed(t.name) and t.device != CPU
    ]
    assert len(beside) > 3
    assert all(beside)


@settings(deadline=None, max_examples=200)
@given(models, st.lists(sizes, min_size=1, max_size=3), st.integers(1, 3))
def test_other_machines_take_whole_layers(what: Subject, free: list[int], n_remote: int) -> None:
    plan = fit(what, machine(free, n_remote))
    remote = {d.name for d in plan.devices if d.is_remote}
    for i, device in enumerate(plan.layers):
        places = {t.device for t in plan.tensors if layer_of(t.name) == i}
        assert not (places & remote) or places == {device}


def test_two_other_machines_share_the_layers() -> None:
    what = subject(n_layer=8, drafts=True, expert=20 * MIB, attention=4 * MIB)
    plan = fit(what, machine([400 * MIB, 400 * MIB], 2))
    assert plan.layers.count("GPU0") in (4, 5)
    assert plan.layers.count("GPU1") in (4, 5)
    assert all(t.device != CPU for t in plan.tensors if layer_of(t.name) is not None)


def test_op_offload_gives_way_to_attention() -> None:
    what = subject(n_layer=4, drafts=False, expert=60 * MIB, attention=4 * MIB)
    roomy = fit(what, Machine((Device("GPU0", 200 * MIB, margin=0),)))
    tight = fit(what, Machine((Device("GPU0", 60 * MIB, margin=0),)))
    assert roomy.contexts.op_offload
    assert not tight.contexts.op_offload
    assert set(tight.layers) == {"GPU0"}


def test_more_rows_wake_more_experts() -> None:
    """E(1 - (1 - k/E)^m), against rows that pick at random."""
    facts = facts_of(n_layer=1, n_expert=64, n_used=6)
    rng = np.random.default_rng(0)
    for m in (1, 2, 4, 8):
        picks = [
            len({e for _ in range(m) for e in rng.permutation(64)[:6].tolist()}) for _ in range(800)
        ]
        assert expert_share(facts, m) == pytest.approx(np.mean(picks) / 64, rel=0.01)
    assert expert_share(facts, 1) == 6 / 64


def test_a_prediction_by_hand() -> None:
    what = subject(n_layer=1, drafts=True, expert=32 * MIB, attention=8 * MIB, n_cells=256)
    plan = fit(what, Machine((), Host(None, 1e9)))
    share = what.facts.n_expert_used / what.facts.n_expert
    trunk = sum(
        t.n_bytes * (share if is_routed(t.name) else 1)
        for t in what.facts.tensors
        if not t.name.startswith(("token_embd", "blk.1."))
    )
    assert seconds(plan, what, 1) == pytest.approx((trunk + plan.caches[0] / 2) / 1e9)
    block = sum(
        t.n_bytes * (share if is_routed(t.name) else 1)
        for t in what.facts.tensors
        if t.name.startswith(("blk.1.", "output.weight"))
    )
    draft = (block + plan.caches[-1] / 2) / 1e9
    found = predict(plan, what)
    assert found.plain == pytest.approx(1 / seconds(plan, what, 1))
    expected = (1 + ACCEPTANCE) / (seconds(plan, what, 2) + draft)
    assert found.by_depth[1] == pytest.approx(expected)
