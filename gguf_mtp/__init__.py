"""gguf-mtp: run DeepSeek-class GGUF models faster with their own Multi-Token-Prediction block.

    with gguf_mtp.load("model.gguf") as model:
        for piece in model.chat([{"role": "user", "content": "Hello"}]):
            print(piece.text, end="")

The names below are the public ones. Importing this package loads neither llama.cpp nor numpy; they
come with the first name that needs them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from gguf_mtp.answers.prepare import AnswerOptions
    from gguf_mtp.engine.engine import Engine
    from gguf_mtp.errors import GgufMtpError
    from gguf_mtp.loading.loader import LoadOptions
    from gguf_mtp.offload.options import PlacementOptions
    from gguf_mtp.params import SamplingParams
    from gguf_mtp.session import Piece, Session
    from gguf_mtp.stats import Stats
    from gguf_mtp.types import Chunk

__version__ = "0.1.0"

__all__ = [
    "AnswerOptions",
    "Chunk",
    "Engine",
    "GgufMtpError",
    "LoadOptions",
    "Piece",
    "PlacementOptions",
    "SamplingParams",
    "Session",
    "Stats",
    "load",
]

_HOMES = {
    "AnswerOptions": "answers.prepare",
    "Chunk": "types",
    "Engine": "engine.engine",
    "GgufMtpError": "errors",
    "LoadOptions": "loading.loader",
    "Piece": "session",
    "PlacementOptions": "offload.options",
    "SamplingParams": "params",
    "Session": "session",
    "Stats": "stats",
}


def load(path: str | Path | None = None, options: LoadOptions | None = None) -> Session:
    """Loads a GGUF, or without a path the demo model, which is made on first use.

    Raises what `gguf_mtp.loading.loader.load` raises, and `ConversionError` when there is no room
    for the demo.
    """
    from gguf_mtp.loading import loader

    if path is None:
        from gguf_mtp.demo import demo_model

        path = demo_model()
    return loader.load(path, options)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'gguf_mtp' has no attribute {name!r}")
    return getattr(import_module(f"gguf_mtp.{_HOMES[name]}"), name)
