"""Plans by hand, and what is said of plans: refusals, advice, sizes, documents."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_mtp.errors import RequestError
from gguf_mtp.gguf.bytes_per_token import is_routed, layer_of
from gguf_mtp.offload import CPU, Contexts, Host, Machine, Subject, fit, parse_devices, parse_host
from gguf_mtp.offload.advice import largest_context, memory_advice, refusal, thrashes
from gguf_mtp.offload.directives import load_params
from gguf_mtp.offload.machine import parse_size
from gguf_mtp.offload.manual import ByHand, manual
from gguf_mtp.offload.predict import predict
from gguf_mtp.offload.report import document, rows
from tests.support.placements import MIB, llama_cpp_places, machine, machines, models, subject


def test_by_hand_as_llama_cpp_counts() -> None:
    what = subject(n_layer=4, drafts=True)
    two = machine([400 * MIB, 400 * MIB])
    assert manual(what, two, ByHand(0)).is_on_cpu
    half = manual(what, two, ByHand(3))  # layer 3, the MTP block, the output
    assert half.layers == (CPU, CPU, CPU, "GPU0", "GPU0")
    assert half.head == "GPU1"
    everything = manual(what, two, ByHand(split=(1.0, 2.0)))
    assert everything.layers == ("GPU0", "GPU0", "GPU1", "GPU1", "GPU1")
    lone = manual(what, two, ByHand(-1, draft_ngl=0))
    assert lone.layers[-1] == CPU
    assert lone.layers[0] == "GPU0"
    moe = manual(what, two, ByHand(cpu_moe=2))
    kept = {layer_of(t.name) for t in moe.tensors if is_routed(t.name) and t.device == CPU}
    assert kept == {1}  # layer 0 is dense
    named = manual(what, two, ByHand(overrides=((r"blk\.[01]\.attn", "GPU1"), ("attn", CPU))))
    places = {t.name: t.device for t in named.tensors}
    assert places["blk.1.attn_output.weight"] == "GPU1"
    assert places["blk.2.attn_output.weight"] == CPU


@settings(deadline=None, max_examples=100)
@given(models, st.integers(-1, 12), st.integers(-1, 6), machines)
def test_llama_cpp_s_rules_give_the_plan_by_hand(
    what: Subject, n_gpu_layers: int, cpu_moe: int, where: Machine
) -> None:
    if not where.devices:
        n_gpu_layers = 0
    plan = manual(what, where, ByHand(n_gpu_layers, cpu_moe=cpu_moe))
    n_blocks = what.facts.n_layer + what.facts.n_mtp
    places, layers, _ = llama_cpp_places(load_params(plan, n_blocks), plan, n_blocks)
    assert places == {t.name: t.device for t in plan.tensors}
    assert tuple(layers[: len(plan.layers)]) == plan.layers


@pytest.mark.parametrize(
    ("hand", "says"),
    [
        (ByHand(split=(1.0,)), "has 1 shares, but the devices are GPU0, GPU1"),
        (ByHand(overrides=(("exps", "CUDA7"),)), "exps=CUDA7 does not name a device; available:"),
        (ByHand(overrides=(("(", CPU),)), "is not a regular expression"),
        (ByHand(split=(0.0, 0.0)), "shares must be 0 or more"),
    ],
)
def test_what_cannot_be_placed_is_said(hand: ByHand, says: str) -> None:
    with pytest.raises(RequestError, match=re.escape(says)):
        manual(subject(), machine([400 * MIB, 400 * MIB]), hand)


def test_layers_without_a_device_are_refused() -> None:
    with pytest.raises(RequestError, match="-ngl is 3, but"):
        manual(subject(), Machine(), ByHand(3))


def test_a_plan_by_hand_that_is_too_large_is_refused() -> None:
    what = subject(n_layer=4, expert=60 * MIB)
    plan = manual(what, machine([100 * MIB]), ByHand(-1))
    said = refusal(plan)
    assert said is not None
    assert re.match(r"this placement puts [\d.]+ MiB on GPU0, which has [\d.]+ MiB avail", said)
    assert refusal(fit(what, machine([100 * MIB]))) is None


def test_memory_that_is_too_small_is_said() -> None:
    what = subject(n_layer=8, expert=60 * MIB)
    poor = fit(what, Machine((), Host(100 * MIB)))
    rich = fit(what, Machine((), Host(100_000 * MIB)))
    assert thrashes(poor)
    assert "every token would wait for the disk" in memory_advice(poor)
    assert not thrashes(rich)
    assert "--no-mmap" in memory_advice(rich)
    assert not thrashes(fit(what, Machine()))  # unknown memory is no reason


def test_the_longest_context_is_the_last_that_fits() -> None:
    what = subject(n_layer=4, expert=60 * MIB, attention=4 * MIB)
    where = machine([100 * MIB])
    most = largest_context(what, where)
    assert 256 < most < what.facts.context_length

    def holds(n_cells: int) -> bool:
        contexts = dataclasses.replace(what.contexts, n_cells=n_cells)
        return CPU not in fit(dataclasses.replace(what, contexts=contexts), where).layers

    assert holds(most)
    assert not holds(most + 256)


def test_a_cache_type_must_fit_the_rows() -> None:
    what = subject()
    for name, says in (("q9", "is not one of"), ("q8_0", "values in blocks of 32")):
        contexts = dataclasses.replace(what.contexts, cache_k=name)
        odd = dict(what.facts.kv) | {"deepseek2.attention.key_length": 70}
        bent = dataclasses.replace(
            what, contexts=contexts, facts=dataclasses.replace(what.facts, kv=odd)
        )
        with pytest.raises(RequestError, match=says):
            fit(bent, Machine())


def test_a_smaller_cache_type_is_counted() -> None:
    what = subject(n_cells=1024)
    f16 = fit(what, Machine())
    q8 = fit(
        dataclasses.replace(what, contexts=dataclasses.replace(what.contexts, cache_k="q8_0")),
        Machine(),
    )
    assert f16.caches[0] == 1024 * 64 * 2
    assert q8.caches[0] == 1024 * 64 // 32 * 34


def test_sizes_and_devices_are_read() -> None:
    assert parse_size("24G") == 24 << 30
    assert parse_size("1.5 GiB") == 3 << 29
    assert parse_size("700") == 700
    a, b = parse_devices("24G,48G@1000", margin=1)
    assert (a.name, a.free, a.margin) == ("GPU0", 24 << 30, 1)
    assert (b.name, b.bandwidth) == ("GPU1", 1e12)
    assert parse_devices("0") == parse_devices("") == ()
    assert parse_host("256G@80").bandwidth == 80e9
    for bad in ("24Q", "-1G", "24G@x", "24G@0", "G"):
        with pytest.raises(RequestError):
            parse_devices(bad)


def test_the_document_has_the_promised_shape() -> None:
    what, where = subject(n_layer=3), machine([80 * MIB])
    plan = fit(what, where)
    found = document(plan, what, where)
    assert found["devices"][0] == {
        "name": "GPU0",
        "budget": where.devices[0].budget,
        "used": plan.used("GPU0"),
    }
    assert found["devices"][-1]["name"] == CPU
    assert sum(t["bytes"] for t in found["tensors"]) == sum(t.n_bytes for t in what.tensors)
    assert set(found["tensors"][0]) == {"name", "bytes", "device"}
    assert found["context"]["cells"] == what.contexts.n_cells
    assert found["predicted"]["plain"] > 0
    assert set(found["predicted"]["by_depth"]) == {"1", "2", "3"}
    table = rows(plan)
    assert [row[0] for row in table] == ["0", "1", "2", "3 (MTP)", "embedding", "output"]
    assert "GPU0" in table[2][1]


def test_a_side_file_s_block_is_placed() -> None:
    """A block from another file lies where the plan says, its own head and embedding counted."""
    own = subject(n_layer=3, drafts=True)
    trunk = dataclasses.replace(own.facts, n_mtp=0)
    trunk = dataclasses.replace(
        trunk, tensors=tuple(t for t in trunk.tensors if not t.name.startswith("blk.3."))
    )
    block = [t for t in own.facts.tensors if not re.match(r"blk\.[0-2]\.", t.name)]
    side = dataclasses.replace(
        own.facts, path="mtp.gguf", tensors=tuple(t._replace(file="mtp.gguf") for t in block)
    )
    what = dataclasses.replace(own, facts=trunk, side=side)
    plan = fit(what, machine([400 * MIB]))
    assert plan.side == "mtp.gguf"
    places = {(t.file, t.name): t.device for t in plan.tensors}
    assert places["mtp.gguf", "output.weight"] == "GPU0"
    assert places["mtp.gguf", "token_embd.weight"] == CPU
    assert plan.used("GPU0") > fit(own, machine([400 * MIB])).weights("GPU0")


def test_the_announced_model_is_the_converted_one(tmp_path: Path) -> None:
    """A header from config.json alone, and the header that a conversion writes."""
    import json

    from gguf_mtp.bench.synthetic import holes, layout, write
    from gguf_mtp.converters.convert import ConvertOptions, plan
    from gguf_mtp.converters.from_config import facts_from_config
    from gguf_mtp.demo import CHECKPOINT

    config = json.loads((CHECKPOINT / "config.json").read_text())
    folder = write(tmp_path / "checkpoint", config, layout(config), holes)
    for kind in ("q4_k_m", "q8_0"):
        found, side = facts_from_config(folder / "config.json", kind)
        assert side is None
        with plan(folder, ConvertOptions(kind)) as job:
            expected = [(t.tensor.name, t.type.name, t.n_bytes) for t in job.tensors]
        assert [(t.name, t.type, t.n_bytes) for t in found.tensors] == expected
        assert found.can_draft


@pytest.mark.parametrize("drafter", ["mtp", "dspark"])
def test_an_announced_v4_is_the_converted_one_with_its_drafter(
    tmp_path: Path, drafter: Literal["mtp", "dspark"]
) -> None:
    """Its experts in the four bits that they have, and the drafter's file counted."""
    from gguf_mtp.converters.convert import ConvertOptions, plan
    from gguf_mtp.converters.from_config import facts_from_config
    from tests.support.v4_checkpoints import tiny

    folder = tiny(tmp_path / "v4", drafter)
    for kind in ("q4_k_m", "q8_0"):
        found, side = facts_from_config(folder / "config.json", kind)
        assert side is not None
        with plan(folder, ConvertOptions(kind)) as job:
            expected = [(t.tensor.name, t.type.name, t.n_bytes) for t in job.tensors]
        announced = [(t.name, t.type, t.n_bytes) for t in (*found.tensors, *side.tensors)]
        assert announced == expected
        assert side.can_draft
    drafts = Contexts(512, n_draft_batch=512)
    made = fit(Subject(found, drafts, side), machine([400 * MIB]))
    assert made.used("GPU0") > sum(t.n_bytes for t in side.tensors)
    assert made.drafter == {"mtp": "MTP", "dspark": "DSpark"}[drafter]
    *_, last, _, _ = rows(made)
    assert last[0] == f"6 ({made.drafter})"
    share = predict(made, Subject(found, drafts, side))
    assert share.plain > share.by_depth[1] / 1.8


def test_empty_contexts_draft_nothing() -> None:
    assert not Contexts(256, n_draft_batch=0).drafts
