"""What is expected of the installed llama-cpp-python: version, structs, unstable calls."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import llama_cpp as L

from gguf_mtp.errors import LoadFailed

LLAMA_CPP_PYTHON = "0.3.36"


def check_binding() -> None:
    """The binding's structs must lie as the library's do, or every option lands in the wrong
    place."""
    if L.__version__ != LLAMA_CPP_PYTHON:
        raise LoadFailed(
            f"llama-cpp-python {L.__version__} is installed, but this version of gguf-mtp "
            f"needs {LLAMA_CPP_PYTHON}"
        )
    model, context = L.llama_model_default_params(), L.llama_context_default_params()
    if model.load_mtp or context.ctx_type != L.LLAMA_CONTEXT_TYPE_DEFAULT:
        raise LoadFailed("llama-cpp-python's structs do not match its library; reinstall it")


def system_info() -> str:
    """What llama.cpp was built to use: `CPU : AVX = 1 | AVX2 = 1 | `."""
    return bytes(L.llama_print_system_info()).decode(errors="replace")


def nextn(name: str) -> Any:
    """One of the unstable C++ exports for hidden rows."""
    try:
        from llama_cpp import llama_cpp_ext

        return getattr(llama_cpp_ext, name)
    except (ImportError, AttributeError) as error:
        raise LoadFailed(
            f"this llama-cpp-python lacks {name}; drafting needs {LLAMA_CPP_PYTHON}"
        ) from error


_SET_LAYER_INPUT = (
    "llama_set_embeddings_layer_inp",
    "_Z30llama_set_embeddings_layer_inpP13llama_contextjb",
    "?llama_set_embeddings_layer_inp@@YAXPEAUllama_context@@I_N@Z",
)
_GET_LAYER_INPUT = (
    "llama_get_embeddings_layer_inp",
    "_Z30llama_get_embeddings_layer_inpP13llama_contextj",
    "?llama_get_embeddings_layer_inp@@YAPEAMPEAUllama_context@@I@Z",
)
"""The calls' names with each compiler; llama-cpp-python does not declare them."""


def layer_inputs() -> tuple[Any, Any]:
    """The calls (context, layer, on) that puts a layer's input out, and (context, layer) that gives
    the rows. A layer number past the last is the last one's output."""
    switch = _exported(_SET_LAYER_INPUT, [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_bool], None)
    floats = ctypes.POINTER(ctypes.c_float)
    return switch, _exported(_GET_LAYER_INPUT, [ctypes.c_void_p, ctypes.c_uint32], floats)


def reserve_again(context: Any) -> None:
    """Makes llama.cpp lay its graph's memory out anew before the next decode.

    `llama_set_embeddings_nextn` does not ask for it: the layout does not know then that hidden rows
    are put out, and may give their memory to something else, so that they are read as garbage.
    Switching a layer's input off, which is off, changes nothing else.
    """
    layer_inputs()[0](context, 0, False)


def _exported(names: Sequence[str], takes: list[Any], gives: Any) -> Any:
    library = L.llama_cpp._lib
    for name in names:
        call = getattr(library, name, None)
        if call is not None:
            call.argtypes, call.restype = takes, gives
            return call
    raise LoadFailed(f"this llama-cpp-python lacks {names[0]}; drafting needs {LLAMA_CPP_PYTHON}")
