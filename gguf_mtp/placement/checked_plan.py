"""From options to a plan that llama.cpp agrees with: finds the devices, plans, checks, corrects.

The check runs in a child process and allocates nothing. What is decided is an `OffloadPlan`; how it
is made is `offload`'s, how it is loaded `loader`'s.
"""

from __future__ import annotations

import json
import logging
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from gguf_mtp.child import run_module
from gguf_mtp.errors import LoadFailed
from gguf_mtp.gguf.arch import dflash
from gguf_mtp.gguf.arch.dflash import BlockShape
from gguf_mtp.llama import ContextOptions, Model, ModelOptions
from gguf_mtp.offload import CPU, Contexts, Host, Machine, OffloadPlan, Subject, fit, report
from gguf_mtp.offload.advice import context_refusal, gib, memory_advice, refusal, thrashes
from gguf_mtp.offload.directives import LoadParams, load_params, side_load_params
from gguf_mtp.offload.manual import manual
from gguf_mtp.offload.options import PlacementOptions
from gguf_mtp.placement import context_size, host_memory
from gguf_mtp.placement.detect import detect_devices, remote_devices

__all__ = [
    "ActualPlacement",
    "CheckedPlan",
    "actual_placement",
    "block_options",
    "plan_placement",
    "target_options",
]

log = logging.getLogger(__name__)

_ATTEMPTS = 6
_CHECK_S = 300.0


@dataclass(frozen=True, slots=True)
class CheckedPlan:
    """A plan with what it was made for. `is_checked`: llama.cpp was asked and agreed."""

    plan: OffloadPlan
    subject: Subject
    options: PlacementOptions
    is_checked: bool

    @property
    def where(self) -> str:
        """Names the placement: another one has other costs."""
        return report.line(self.plan)

    def model_options(self, load_mtp: bool) -> ModelOptions:
        """For the model's own file."""
        facts = self.subject.facts
        params = load_params(self.plan, facts.n_layer + facts.n_mtp)
        return self._model_options(params, load_mtp)

    def side_options(self) -> ModelOptions:
        """For the file that the MTP block lies in."""
        return self._model_options(side_load_params(self.plan), load_mtp=True)

    def _model_options(self, params: LoadParams, load_mtp: bool) -> ModelOptions:
        return ModelOptions(load_mtp=load_mtp, load_params=params, load_mode=self.options.load_mode)


class ActualPlacement(NamedTuple):
    """Where everything really went: `found[file, name]` is the device that llama.cpp says a tensor
    lies on; empty where it cannot be asked. `draft`: the draft model's plan, if there is one."""

    plan: OffloadPlan
    is_checked: bool
    found: Mapping[tuple[str, str], str]
    draft: OffloadPlan | None = None

    @property
    def misplaced(self) -> dict[str, str]:
        """Tensors that lie elsewhere than planned, with the device they lie on."""
        planned = {(t.file, t.name): t.device for t in self.plan.tensors}
        return {key[1]: d for key, d in self.found.items() if planned.get(key, d) != d}

    def lines(self) -> list[str]:
        """For people: one line, one for a draft model, and one more for what went otherwise than
        planned."""
        out, misplaced = [report.line(self.plan)], self.misplaced
        out += [f"draft model: {report.line(self.draft)}"] if self.draft else []
        if misplaced:
            name, device = next(iter(misplaced.items()))
            more = f" and {len(misplaced) - 1} more" if len(misplaced) > 1 else ""
            out.append(f"not as planned: {name} is on {device}{more}")
        return out


def actual_placement(checked: CheckedPlan, model: Model, block: Model | None) -> ActualPlacement:
    """Asks llama.cpp where each tensor of the plan lies, and warns of those that lie elsewhere."""
    plan = checked.plan
    found: dict[tuple[str, str], str] = {}
    for owner, is_side in ((model, False), (block, True)):
        files = {t.name: t.file for t in plan.tensors if (t.file == plan.side) == is_side}
        places = owner.places(files) if owner and files else {}
        found |= {(files[name], name): device for name, device in places.items()}
    placement = ActualPlacement(plan, checked.is_checked, found)
    for line in placement.lines()[1:]:
        log.warning("%s", line)
    return placement


def plan_placement(
    subject: Subject, options: PlacementOptions, draft: OffloadPlan | None = None
) -> CheckedPlan:
    """The plan for a model as the user options, checked against llama.cpp where a device is used.
    `draft`: what another model will take.

    Raises `RequestError` for options that the model or the machine contradicts, `LoadFailed` for a
    worker that cannot be reached, a plan over a device's budget, and more than memory holds.
    """
    subject = replace(subject, contexts=context_size.with_options(subject, options))
    machine = Machine(detect_devices(options), Host(host_memory.available()))
    if draft is not None:
        machine = machine.without(draft)
    too_long = context_refusal(subject, machine)
    if too_long:
        raise LoadFailed(too_long)
    hand = options.hand
    if not machine.devices and (hand.n_gpu_layers or 0) > 0:
        log.warning(
            "-ngl %d: llama.cpp finds no device here, so the model stays on the CPU",
            hand.n_gpu_layers,
        )
        hand = replace(hand, n_gpu_layers=None)

    def made(where: Machine) -> OffloadPlan:
        plan = fit(subject, where) if hand.is_empty else manual(subject, where, hand)
        too_much = None if options.fit == "off" else refusal(plan)
        if too_much:
            raise LoadFailed(f"{too_much}; offload fewer layers, or pass --fit off to try anyway")
        if thrashes(plan) and not options.allow_thrash:
            raise LoadFailed(memory_advice(plan))
        return plan

    plan = made(machine)
    checked = (
        CheckedPlan(plan, subject, options, False)
        if plan.is_on_cpu or options.fit == "off"
        else _checked(made, machine, subject, options)
    )
    if hand.is_empty:
        _tell_of_unused(checked.plan)
    return checked


def _tell_of_unused(plan: OffloadPlan) -> None:
    for device in plan.devices:
        if not plan.used(device.name):
            log.warning(
                "nothing is placed on %s: of %s free, --fit-margin reserves %s, and the compute "
                "buffers do not fit in the rest",
                device.name, gib(device.free), gib(device.margin),
            )  # fmt: skip


def _checked(
    made: Callable[[Machine], OffloadPlan],
    machine: Machine,
    subject: Subject,
    options: PlacementOptions,
) -> CheckedPlan:
    """Asks llama.cpp what the plan takes, and plans again with what was missing, until it fits."""
    for _ in range(_ATTEMPTS):
        plan = made(machine)
        contexts = plan.contexts
        subject = replace(subject, contexts=contexts)
        found = _ask(plan, subject, options.rpc)
        if found is None:
            return CheckedPlan(plan, subject, options, False)
        plan = _as_found(plan, found)
        if not plan.over_budget():
            return CheckedPlan(plan, subject, options, True)
        more = {d.name: n - d.budget for d, n in plan.over_budget()}
        reserve = {
            name: machine.reserve.get(name, 0) + more.get(name, 0)
            for name in {*machine.reserve, *more}
        }
        log.info("llama.cpp needs more memory than planned (%s): planning again", more)
        machine = replace(machine, reserve=reserve)
    raise LoadFailed(refusal(plan) or "no placement fits")


def _as_found(plan: OffloadPlan, found: Mapping[str, Sequence[int]]) -> OffloadPlan:
    """The plan with llama.cpp's own numbers for what it holds besides weights and cache."""
    compute = dict(plan.compute)
    for device in plan.devices:
        if device.name in found:
            known = plan.weights(device.name) + plan.cache(device.name)
            compute[device.name] = sum(found[device.name]) - known
    return replace(plan, compute=compute)


def _ask(
    plan: OffloadPlan, subject: Subject, workers: Sequence[str]
) -> Mapping[str, Sequence[int]] | None:
    """Bytes of weights, cache and buffers of each device; None when llama.cpp cannot be asked.

    In a process of its own the workers' devices are numbered from 0 on.
    """
    there = [name for name, _ in remote_devices(workers)]
    names_there = {name: f"RPC{i}" for i, name in enumerate(there)}
    n_blocks = subject.facts.n_layer + subject.facts.n_mtp
    drafts = subject.contexts.drafts
    side = subject.side if drafts else None
    shape = dflash.shape(side)
    request = {
        "rpc": list(workers),
        "model": {
            "path": str(Path(subject.facts.path).absolute()),
            "load_params": load_params(plan, n_blocks).renamed(names_there),
            "load_mtp": drafts and side is None,
        },
        "side": side
        and {
            "path": str(Path(side.path).absolute()),
            "load_params": side_load_params(plan).renamed(names_there),
            "load_mtp": True,
        },
        "target": asdict(target_options(plan.contexts, 1, drafts, shape)),
        "block": asdict(block_options(plan, 1, shape)) if drafts else None,
        "block_size": shape.size if shape else 0,
    }
    try:
        done = run_module("gguf_mtp.llama.memory_probe", json.dumps(request).encode(), _CHECK_S)
        done.check_returncode()
        found = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        stderr = getattr(error, "stderr", None) or str(error).encode()
        said = stderr.decode(errors="replace").strip().splitlines()
        log.warning("cannot check the placement against llama.cpp: %s", said[-1] if said else "")
        return None
    names_here = {name: mine for mine, name in names_there.items()}
    return {names_here.get(name, name): n for name, n in found.items()} or None


def target_options(
    contexts: Contexts, n_threads: int, hidden: bool, shape: BlockShape | None = None
) -> ContextOptions:
    """The target's context as planned. `hidden`: something reads its hidden rows; with `shape` it
    is a drafter of blocks."""
    return ContextOptions(
        n_ctx=contexts.n_cells,
        n_seq=contexts.n_seq,
        n_batch=contexts.n_batch,
        n_outputs=contexts.n_outputs,
        n_threads=n_threads,
        hidden=hidden and shape is None,
        layers=shape.layer_inputs if hidden and shape else (),
        cache_k=contexts.cache_k,
        cache_v=contexts.cache_v,
        flash=contexts.attention,
        kv_offload=contexts.kv_offload,
        op_offload=contexts.op_offload,
        n_rewind=contexts.n_rewind,
    )


def block_options(
    plan: OffloadPlan, n_threads: int, shape: BlockShape | None = None
) -> ContextOptions:
    """The context of the MTP block as planned, or with `shape` of stages that draft blocks, which
    reach past the last token. It never copies experts: its batches are small."""
    contexts = plan.contexts
    size = shape.size if shape else 0
    return replace(
        target_options(contexts, n_threads, hidden=False),
        n_ctx=contexts.n_cells + contexts.n_seq * size,
        is_mtp=shape is None,
        n_batch=max(contexts.n_draft_batch, size),
        n_outputs=contexts.n_seq * max(size, 1),
        kv_offload=contexts.kv_offload and plan.layers[-1] != CPU,
        op_offload=False,
        n_rewind=0,
    )
