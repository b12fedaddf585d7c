"""gguf-mtp: run DeepSeek-class GGUF models faster with their own Multi-Token-Prediction block."""

from __future__ import annotations

__version__ = "0.1.0"
