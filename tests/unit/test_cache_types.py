"""What the types of the KV cache change beside its bytes: what fits, may idle, and restores."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gguf_mtp.demo import demo_model
from gguf_mtp.errors import LoadFailed, SavedStateError
from gguf_mtp.gguf import model_facts
from gguf_mtp.gguf.bytes_per_token import kv_per_cell
from gguf_mtp.loading.loader import (
    LoadOptions,
    _bounds,
    _fingerprint,
    _idle_cells,
    _placement_options,
    _subject,
    load,
)
from gguf_mtp.loading.select import DrafterSelection
from gguf_mtp.offload import Contexts, Device, Host, Machine, Subject
from gguf_mtp.offload.advice import context_refusal
from gguf_mtp.offload.options import PlacementOptions
from gguf_mtp.params import SamplingParams
from gguf_mtp.placement import context_size, host_memory
from gguf_mtp.placement.checked_plan import plan_placement
from gguf_mtp.types import ModelFacts
from tests.support.placements import facts_of

GROUPED = {"attention.head_count_kv": 2, "attention.key_length": 64, "attention.value_length": 32}


def grouped() -> ModelFacts:
    """Keys of 128 values and values of 64, in 3 layers and a block."""
    return replace(
        facts_of(), architecture="glm4moe", kv={f"glm4moe.{k}": v for k, v in GROUPED.items()}
    )


def loaded(cache_k: str, cache_v: str, strict: bool = False) -> Subject:
    options = LoadOptions(
        placement=PlacementOptions(cache_k=cache_k, cache_v=cache_v), strict=strict
    )
    facts, none = grouped(), DrafterSelection()
    subject = _subject(facts, none, _bounds(facts, none, options), options, 4096)
    return plan_placement(subject, _placement_options(options)).subject


def test_keys_and_values_are_counted_each_in_its_type() -> None:
    facts = grouped()
    assert kv_per_cell(facts) == 4 * (128 + 64) * 2
    assert kv_per_cell(facts, "q8_0", "f16") == 4 * (128 // 32 * 34 + 64 * 2)
    assert kv_per_cell(facts, "f16", "q4_0") == 4 * (128 * 2 + 64 // 32 * 18)


def test_more_prefixes_may_idle_in_a_smaller_cache() -> None:
    f16 = _idle_cells(loaded("f16", "f16"))
    assert _idle_cells(loaded("q8_0", "q8_0")) == pytest.approx(f16 * 64 / 34, abs=2)
    assert _idle_cells(loaded("q8_0", "f16")) == pytest.approx(f16 * 384 / 264, abs=2)
    assert _idle_cells(loaded("f16", "f16", strict=True)) == pytest.approx(f16 / 2, abs=2)


def test_what_is_saved_names_both_types() -> None:
    facts = model_facts.read(demo_model())
    names = {
        _fingerprint([facts], Contexts(256, cache_k=k, cache_v=v)).split(" with ")[1]
        for k in ("f16", "q8_0")
        for v in ("f16", "q8_0")
    }
    assert names == {"F16 cache", "Q8_0 cache", "F16/Q8_0 cache", "Q8_0/F16 cache"}


@pytest.mark.native
def test_a_sequence_of_another_cache_is_refused() -> None:
    def options(kind: str) -> LoadOptions:
        return LoadOptions(
            n_ctx=64, draft="off", placement=PlacementOptions(cache_k=kind, cache_v=kind)
        )

    prompt = [5, 6, 7, 8, 9, 10]
    with load(demo_model(), options("f16")) as session:
        list(session.engine.generate([prompt], SamplingParams(temperature=0), 4))
        data = session.engine.save(prompt)
    says = pytest.raises(SavedStateError, match=r"other settings: .* F16 cache.* Q8_0 cache")
    with load(demo_model(), options("q8_0")) as session, says:
        session.engine.restore(data)


def test_a_context_that_fits_in_a_smaller_type_is_not_refused() -> None:
    facts = grouped()

    def refusal(kind: str, n_bytes: int, *devices: Device) -> str | None:
        contexts = context_size.contexts(4096, 2)
        subject = Subject(facts, replace(contexts, cache_k=kind, cache_v=kind))
        return context_refusal(subject, Machine(devices, Host(n_bytes)))

    need = 3 * (128 + 64) * 2 * 8192  # nothing drafts: no block
    assert refusal("f16", need) is None
    assert refusal("f16", need - 1) == (
        "a context of 4096 tokens for 2 sequences needs 9.0 MiB, but this machine has 9.0 MiB "
        "available; lower -c or --parallel"
    )
    assert refusal("q8_0", need - 1) is None
    assert refusal("f32", need) is not None
    assert refusal("f16", need - 1, Device("GPU0", 1)) is None  # a device takes some


@pytest.mark.native
def test_a_containers_memory_is_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available", lambda: 64 << 20)
    with pytest.raises(LoadFailed, match=r"needs .* but this machine has 64.0 MiB available"):
        load(demo_model(), LoadOptions(n_ctx=200_000, draft="off"))
