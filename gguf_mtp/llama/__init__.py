"""The only module that touches llama_cpp: a model, its contexts, its vocabulary.

It knows nothing of sequences' meaning, drafting or text formats. llama.cpp answers misuse with an
abort of the process (`GGML_ASSERT`), so everything that could reach one is checked here first and
raised as a sentence. Written against llama-cpp-python 0.3.36; the calls that put hidden rows out
are C++ exports which that package calls unstable, so they are looked up by name when a model is
loaded.
"""

from __future__ import annotations

from gguf_mtp.llama.binding import LLAMA_CPP_PYTHON
from gguf_mtp.llama.context import REFUSED, Context
from gguf_mtp.llama.context_options import ContextOptions
from gguf_mtp.llama.devices import accelerators, devices, is_remote, lent
from gguf_mtp.llama.model import Model, ModelOptions
from gguf_mtp.llama.rpc import connect
from gguf_mtp.llama.vocab import Vocab

__all__ = [
    "LLAMA_CPP_PYTHON",
    "REFUSED",
    "Context",
    "ContextOptions",
    "Model",
    "ModelOptions",
    "Vocab",
    "accelerators",
    "connect",
    "devices",
    "is_remote",
    "lent",
]
