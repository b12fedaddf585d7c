"""What contexts of single architectures need, where llama.cpp does not see to it itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["NO_RULES", "RULES", "ContextRules", "rules_of"]


class ContextRules(NamedTuple):
    """`masked_block`: the MTP graph puts hidden rows out for its output rows alone, and with any
    other mask ends the process; elsewhere a mask gives the first rows of a batch instead.
    `unified`: sequences share their cells. Separate ones split an uneven batch into several passes;
    where an architecture keeps them apart anyway, sharing only multiplies the memory.
    `full_window`: layers with a sliding window keep every row, so that any can be dropped; where
    states bound that anyway, the window's rows are enough."""

    masked_block: bool = False
    unified: bool = True
    full_window: bool = True


NO_RULES = ContextRules()
RULES: Mapping[str, ContextRules] = {
    "deepseek4": ContextRules(masked_block=True, unified=False, full_window=False),
}


def rules_of(architecture: str) -> ContextRules:
    return RULES.get(architecture, NO_RULES)
