"""What an automatic depth has learned, as plain JSON-able values: for a warm start.

Costs belong to one model file on one machine with one set of options; whoever stores a state keys
it by those. What is read back is checked value by value: a state that makes no sense is refused
with a reason and changes nothing. Per-sequence evidence and probes in progress are not kept.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from gguf_mtp.depth.acceptance import SHARED_MEMORY, Rates
from gguf_mtp.depth.confidence import N_BINS, Calibration
from gguf_mtp.depth.controller import AutoDepth, DrafterKnowledge, LearnedState
from gguf_mtp.depth.cost_model import DraftCost, TargetCost
from gguf_mtp.depth.drafter_controller import DrafterController

VERSION = 2
_MOST_ROWS = 4096
_LONGEST = 3600.0  # seconds that a decode may have taken


class _Probes(NamedTuple):
    """Where a drafter's probes stood: rounds left to wait down and up, the lengths of those waits,
    and the purse in plain rounds."""

    left: list[int]
    length: list[int]
    purse: float


def export_state(depth: AutoDepth) -> dict[str, Any] | None:
    """What `import_state` takes back; None before any time is known."""
    known = depth.target.known()
    if not known:
        return None
    plain = depth.target.mean(2)[1]
    return {
        "version": VERSION,
        "target": {str(m): [seconds, n] for m, (seconds, n) in known.items()},
        "noise": depth.target.noise,
        "rebuild": depth.target.rebuild,
        "drafters": {name: _exported(one, plain) for name, one in depth.controllers.items()},
        "free_drafts": {
            name: _bins_of(one.calibration) for name, one in depth.arbiter.known.items()
        },
    }


def _exported(source: DrafterController, plain: float) -> dict[str, Any]:
    shared = source.acceptance.shared
    return {
        "draft": list(source.draft.weights) if source.draft.n else None,
        "idle": source.draft.idle,
        "shared": [list(shared.hits), list(shared.seen)],
        "bins": _bins_of(source.stopping.calibration),
        "probes": {**source.prober.waits(), "purse": source.prober.purse(plain)},
    }


def _bins_of(calibration: Calibration) -> list[list[list[float]]]:
    return [[list(row) for row in calibration.hits], [list(row) for row in calibration.seen]]


def import_state(depth: AutoDepth, state: object) -> str | None:
    """Warm-start `depth`, which has recorded no round yet; the reason if `state` is refused."""
    try:
        learned, probes = _learned(state, depth.n_max, depth.n_max_free)
    except (KeyError, TypeError, ValueError) as error:
        what = f"no entry {error}" if isinstance(error, KeyError) else str(error)
        return f"the stored depth state is not usable: {what}"
    depth.warm_start(learned)
    plain = learned.target.mean(2)[1]
    for name, one in probes.items():
        depth.controller(name).prober.restore(one.left, one.length, one.purse * plain)
    return None


def _learned(state: object, n_max: int, n_max_free: int) -> tuple[LearnedState, dict[str, _Probes]]:
    whole = _dict(state)
    if whole["version"] != VERSION:
        raise ValueError(f"its version is {whole['version']!r}, not {VERSION}")
    target = _target(whole)
    drafters = {str(name): _dict(one) for name, one in _dict(whole["drafters"]).items()}
    free_drafts = {
        str(name): _bins(one, n_max_free) for name, one in _dict(whole["free_drafts"]).items()
    }
    skills = {name: _skill(one, n_max) for name, one in drafters.items()}
    probes = {name: _probes(one["probes"]) for name, one in drafters.items()}
    return LearnedState(target, skills, free_drafts), probes


def _skill(one: dict[str, Any], n_max: int) -> DrafterKnowledge:
    draft = DraftCost()
    if one["draft"] is not None:
        first, step, row = (_number(w, -_LONGEST, _LONGEST) for w in _list(one["draft"], 3))
        if step <= 0:
            raise ValueError(f"a draft step cannot take {step} seconds")
        draft.restore([first, step, row])
    draft.idle = _number(one["idle"], 0, _LONGEST)
    shared = Rates(n_max, SHARED_MEMORY)
    hits, seen = _list(one["shared"], 2)
    shared.restore(*_counts(hits, seen))
    return DrafterKnowledge(draft, shared, _bins(one["bins"], n_max))


def _bins(value: object, n_max: int) -> Calibration:
    calibration = Calibration(n_max)
    hits, seen = _list(value, 2)
    rows = [_counts(h, s, N_BINS) for h, s in zip(_list(hits), _list(seen), strict=True)]
    calibration.restore([h for h, _ in rows], [s for _, s in rows])
    return calibration


def _probes(value: object) -> _Probes:
    one = _dict(value)
    left, length = ([int(_number(n, 0, 1e6)) for n in _list(one[k], 2)] for k in ("left", "length"))
    return _Probes(left, length, _number(one["purse"], -1e6, 1e6))


def _target(whole: dict[str, Any]) -> TargetCost:
    known = {}
    for rows, one in _dict(whole["target"]).items():
        seconds, n = _list(one, 2)
        m = int(rows)
        if not 0 < m <= _MOST_ROWS:
            raise ValueError(f"a decode cannot have {m} rows")
        known[m] = (_number(seconds, 1e-7, _LONGEST), _number(n, 1, math.inf))
    if not known:
        raise ValueError("it has no decode times")
    target = TargetCost()
    target.restore(known, _number(whole["noise"], 0, 10), _number(whole["rebuild"], 0, _LONGEST))
    return target


def _counts(
    hits: object, seen: object, length: int | None = None
) -> tuple[list[float], list[float]]:
    """Accepted tokens never outnumber judged ones."""
    pairs = [
        (_number(h, 0, 1e9), _number(s, 0, 1e9))
        for h, s in zip(_list(hits, length), _list(seen, length), strict=True)
    ]
    if any(h > s * (1 + 1e-9) + 1e-9 for h, s in pairs):
        raise ValueError("more tokens were accepted than judged")
    return [h for h, _ in pairs], [s for _, s in pairs]


def _dict(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r:.40} is not a dict")
    return value


def _list(value: object, length: int | None = None) -> list[Any]:
    if not isinstance(value, list) or (length is not None and len(value) != length):
        raise TypeError(f"{value!r:.40} is not a list of {length or 'any number of'} values")
    return value


def _number(value: object, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r:.40} is not a number")
    if not least <= value <= most:  # also refuses what is not a number at all (NaN)
        raise ValueError(f"{value!r:.40} is not between {least:g} and {most:g}")
    return float(value)
