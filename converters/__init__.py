"""Turning checkpoints into GGUF files. Knows nothing of the run time."""

from __future__ import annotations

# Raise it when the same checkpoint and options give other bytes: caches go by it.
CONVERTER_VERSION = "1"
