"""How many tokens to draft next: the choice that keeps drafting from ever costing speed.

Pure decisions from counts and measured times. This package knows nothing of models, tokens, logits
or llama.cpp. It computes with plain floats, not arrays: a choice is made in every round and must
cost microseconds.

    auto         AutoDepth: what happens in a round      fixed        FixedDepth
    plan         expected tokens per second of depths    watchdog     a head that never fits
    costs        T(m) and the draft steps, measured      probe        what trying others may cost
    acceptance   by sequence and position, over a prior  report       what to tell the user
    confidence   where to end a draft early              state        export and import
    stopping     and whether to
"""

from gguf_mtp.depth.controller import AutoDepth
from gguf_mtp.depth.fixed import FixedDepth
from gguf_mtp.depth.options import DepthOptions
from gguf_mtp.depth.protocol import Depth
from gguf_mtp.depth.report import DepthReport
from gguf_mtp.depth.warm_start import export_state, import_state
from gguf_mtp.depth.watchdog import Watchdog

__all__ = [
    "AutoDepth",
    "DepthOptions",
    "DepthReport",
    "FixedDepth",
    "Watchdog",
    "depth_for",
    "export_state",
    "import_state",
]


def depth_for(options: DepthOptions) -> Depth:
    """Automatic within the bounds; equal bounds make it fixed, and 0 off."""
    if options.is_fixed:
        return FixedDepth(options.draft_max, options.draft_p_min)
    return AutoDepth(options)
