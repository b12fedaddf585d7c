"""How many tokens to draft next: the choice that keeps drafting from ever costing speed.

Pure decisions from counts and measured times. This package knows nothing of models, tokens, logits
or llama.cpp. It computes with plain floats, not arrays: a choice is made in every round and must
cost microseconds.

    protocol             the seam: `DraftRequest` in, `DraftLimit` out, `RoundFeedback` back
    controller           AutoDepth: what happens in a round       fixed         FixedDepth
    drafter_controller   how far one drafter's drafts pay         probing       what trials may cost
    drafter_selector     which of several drafters is active      report        what to tell users
    ngram_arbiter        when a free draft takes its place        warm_start    export and import
    goodput              expected tokens per second of depths     cost_model    T(m), draft steps
    acceptance           by sequence and position, over a prior   watchdog      a misfit drafter
    early_exit           where to end a draft early, from what `confidence` is worth
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
        return FixedDepth(options.draft_max, options.draft_p_min, options.blocks)
    return AutoDepth(options)
