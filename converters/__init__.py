"""Turning checkpoints into GGUF files. Knows nothing of the run time."""

from __future__ import annotations

import os

from ..errors import ConversionError

if not hasattr(os, "preadv"):
    raise ConversionError(
        "converting needs Linux or macOS (os.preadv, fcntl.flock); on Windows install gguf-mtp in "
        "WSL 2"
    )

# Raise it when the same checkpoint and options give other bytes: caches go by it.
CONVERTER_VERSION = "1"
