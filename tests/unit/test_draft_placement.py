"""A draft model beside its target: placed first, counted, and said."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from gguf_mtp.cli.plan import plan
from gguf_mtp.errors import LoadFailed
from gguf_mtp.gguf import model_facts
from gguf_mtp.loading.loader import LoadOptions, load
from gguf_mtp.offload import CPU, Contexts, Device, Host, Machine, fit
from gguf_mtp.offload.options import PlacementOptions
from gguf_mtp.params import SamplingParams
from gguf_mtp.placement import host_memory
from gguf_mtp.placement.checked_plan import plan_placement
from gguf_mtp.placement.draft_placement import draft_subject, place_draft_model
from gguf_mtp.types import ModelFacts
from tests.support import recurrent_models
from tests.support.gguf_files import Model as Tiny
from tests.support.placements import MIB, facts_of, machine, subject

app = typer.Typer()
app.command()(plan)


def draft() -> ModelFacts:
    """A model of one layer with few experts."""
    return replace(facts_of(n_layer=1, expert=2 * MIB, attention=MIB), n_mtp=0, can_draft=False)


def test_the_target_gets_what_the_draft_model_leaves() -> None:
    what = subject(drafts=False)
    devices = (Device("GPU0", 50 * MIB, margin=0), Device("GPU1", 40 * MIB, margin=0))
    where = Machine(devices, Host(500 * MIB))
    alone = fit(what, where)
    beside = fit(draft_subject(draft(), what.contexts), where)
    assert beside.used("GPU0") + beside.used("GPU1") > 0
    left = where.without(beside)
    for device, before in zip(left.devices, where.devices, strict=True):
        assert device.free == before.free - beside.used(device.name)
    assert left.host.available == 500 * MIB - beside.used(CPU)
    made = fit(what, left)
    for device in where.devices:
        assert made.used(device.name) + beside.used(device.name) <= device.free
    assert made.used(CPU) > alone.used(CPU)


def test_memory_that_is_not_known_stays_so() -> None:
    beside = fit(draft_subject(draft(), subject().contexts), machine([]))
    assert Machine().without(beside).host.available is None


def test_its_context_holds_every_sequence_in_the_targets_types() -> None:
    contexts = replace(subject().contexts, n_cells=6144, n_seq=3, cache_k="q8_0", cache_v="q8_0")
    own = draft_subject(draft(), contexts).contexts
    assert (own.n_cells, own.n_seq, own.n_draft_batch) == (6144, 3, 0)
    assert (own.cache_k, own.cache_v) == ("q8_0", "q8_0")


def small(path: Path) -> Path:
    """A model without a block, of the same vocabulary."""
    model = Tiny()
    model.hyper |= {"nextn_predict_layers": 0, "block_count": 2}
    model.shapes = {n: s for n, s in model.shapes.items() if not n.startswith("blk.2.")}
    return model.write(path)


def test_plan_counts_and_names_it(tmp_path: Path) -> None:
    big, little = Tiny().write(tmp_path / "big.gguf"), small(tmp_path / "small.gguf")
    where = ["--ram", "1G", "--vram", "4M", "--margin", "0", "-c", "256"]
    command = [str(big), *where, "--draft-model", str(little)]
    found = json.loads(CliRunner().invoke(app, [*command, "--json"]).output)
    own = json.loads(
        CliRunner().invoke(app, [str(little), *where, "--json", "--draft-max", "0"]).output
    )
    said = CliRunner().invoke(app, command).output
    assert found["draft_model"]["model"] == str(little)
    assert [d["used"] for d in found["draft_model"]["devices"]] == [
        d["used"] for d in own["devices"]
    ]
    for device, taken, before in zip(
        found["devices"], own["devices"], (4 * MIB, 1024 * MIB), strict=True
    ):
        assert device["budget"] == before - taken["used"]
    assert f"draft       {little}: 1.3 MiB GPU0, 0.4 MiB CPU, already subtracted above" in said
    assert "(MTP)" not in said


def test_settling_takes_it_off_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    little = model_facts.read(small(tmp_path / "small.gguf"))
    monkeypatch.setattr(host_memory, "available", lambda: 100 * MIB)
    what = subject(drafts=False, n_cells=256)
    beside = place_draft_model(little, what.contexts, PlacementOptions())
    assert beside is not None
    assert beside.plan.is_on_cpu
    settled = plan_placement(what, PlacementOptions(allow_thrash=True), beside.plan)
    assert settled.plan.host.available == 100 * MIB - beside.plan.used(CPU)
    assert place_draft_model(None, what.contexts, PlacementOptions()) is None


@pytest.mark.native
def test_both_are_loaded_where_they_were_planned(tmp_path: Path) -> None:
    big = recurrent_models.write(tmp_path / "big.gguf", "qwen35")
    little = small(tmp_path / "small.gguf")
    options = LoadOptions(
        n_ctx=256, n_seq=2, draft="model", draft_model=little, draft_min=2, draft_max=2,
        strict=True,
    )  # fmt: skip
    greedy, prompts = SamplingParams(temperature=0), [[5, 6, 7, 8], [9, 10, 11]]

    def answers(options: LoadOptions) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {0: [], 1: []}
        with load(big, options) as session:
            for chunk in session.engine.generate(prompts, greedy, 20):
                found[chunk.seq] += chunk.tokens
            if options.draft == "model":
                assert session.engine.totals.drafted > 0
                assert session.placement is not None
                assert re.fullmatch(
                    r"draft model: CPU \d\.\d MiB \(.*\)", session.placement.lines()[1]
                )
        return found

    assert answers(options) == answers(replace(options, draft="off", draft_model=None))


def test_no_memory_is_left_for_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    little = small(tmp_path / "small.gguf")
    big = Tiny().write(tmp_path / "big.gguf")
    monkeypatch.setattr(host_memory, "available", lambda: 2 * MIB)
    alone = plan_placement(draft_subject(model_facts.read(big), Contexts(256)), PlacementOptions())
    assert alone.plan.used(CPU) < 1.9 * MIB
    with pytest.raises(LoadFailed, match="would be in CPU memory, but"):
        load(big, LoadOptions(n_ctx=256, draft="model", draft_model=little))
