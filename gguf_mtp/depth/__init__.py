"""How many tokens to draft next: the choice that keeps drafting from ever costing speed.

Pure decisions from counts and measured times. This package knows nothing of models, tokens, logits
or llama.cpp. It computes with plain floats, not arrays: a choice is made in every round and must
cost microseconds.
"""

from gguf_mtp.depth.fixed import FixedDepth
from gguf_mtp.depth.watchdog import Watchdog

__all__ = ["FixedDepth", "Watchdog"]
