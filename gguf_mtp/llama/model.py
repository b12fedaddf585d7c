"""The weights and the vocabulary of one GGUF."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

import llama_cpp as L

from gguf_mtp.errors import LoadFailed, UnsupportedModel
from gguf_mtp.llama.binding import check_binding
from gguf_mtp.llama.block_context import BlockContext
from gguf_mtp.llama.buffer_breakdown import places
from gguf_mtp.llama.context import Context
from gguf_mtp.llama.context_options import ContextOptions
from gguf_mtp.llama.context_rules import rules_of
from gguf_mtp.llama.devices import handles, is_remote
from gguf_mtp.llama.log import Errors, forward_log
from gguf_mtp.llama.tensor_overrides import TensorOverrides
from gguf_mtp.llama.vocab import Vocab, meta
from gguf_mtp.offload.directives import LoadParams
from gguf_mtp.offload.options import LOAD_MODES

AnyContext = TypeVar("AnyContext", bound=Context)


def _unplanned(n_gpu_layers: int) -> LoadParams:
    """All devices of this machine, none of another's: llama.cpp would ask lost workers too, which
    ends the process."""
    own = [name for name in handles() if not is_remote(name)]
    return LoadParams(tuple(own), n_gpu_layers, (), ())


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How weights are loaded. `n_gpu_layers` counts the MTP block and the output as layers; -1 is
    all; where a plan says what goes where (`load_params`), it is not looked at. `load_mode` is one
    of `offload.options.LOAD_MODES`. `no_alloc` reads the header only and reckons what memory would
    be taken; without `repack` weights stay as the file has them, slower to multiply."""

    n_gpu_layers: int = -1
    load_mtp: bool = False
    load_params: LoadParams | None = None
    load_mode: str = "auto"
    no_alloc: bool = False
    repack: bool = True


class Model:
    """The weights and the vocabulary of one GGUF. A context manager; closing it closes its
    contexts."""

    def __init__(self, path: str, options: ModelOptions = ModelOptions()) -> None:
        """Loads `path`. Raises `LoadFailed` with llama.cpp's own reason.

        Check the header first (`gguf.model_facts.read`): llama.cpp aborts the process on some bad
        files.
        """
        check_binding()
        L.llama_log_set(forward_log, ctypes.c_void_p(0))
        self._stack = ExitStack()
        params = L.llama_model_default_params()
        params.load_mtp = options.load_mtp
        params.n_gpu_layers = options.n_gpu_layers
        params.load_mode = LOAD_MODES[options.load_mode]
        params.no_alloc, params.use_extra_bufts = options.no_alloc, options.repack
        # llama.cpp borrows these arrays for as long as the model lives.
        self._overrides = TensorOverrides(
            params, options.load_params or _unplanned(options.n_gpu_layers)
        )
        with Errors() as errors:
            self._model = L.llama_model_load_from_file(os.fsencode(path), params)
        if not self._model:
            raise LoadFailed(f"{path}: {errors.reason()}")
        self._stack.callback(L.llama_model_free, self._model)
        self.n_hidden: int = L.llama_model_n_embd_out(self._model)
        """Width of a hidden row: the embedding's, times the residual streams."""
        self._rules = rules_of(meta(self._model, b"general.architecture"))
        # The header's count stays when the block's weights were not loaded; its graph would abort.
        self.n_mtp: int = L.llama_model_n_layer_nextn(self._model) if options.load_mtp else 0
        self.context_length: int = L.llama_model_n_ctx_train(self._model)
        self.vocab = Vocab(self._model)
        self._stack.callback(self.vocab.close)

    def context(self, options: ContextOptions) -> Context:
        """A new context. Raises `UnsupportedModel` (no MTP block) or `LoadFailed` (no memory)."""
        if options.is_mtp and self.n_mtp != 1:
            raise UnsupportedModel(
                f"{self.n_mtp} MTP blocks are loaded, but llama.cpp runs exactly one"
            )
        width = self.n_hidden
        if options.layers:
            n_layer = L.llama_model_n_layer(self._model)
            if max(options.layers) > n_layer:  # llama.cpp would abort
                raise UnsupportedModel(
                    f"the drafter reads layer {max(options.layers)}, but the model has {n_layer}"
                )
            width = len(options.layers) * L.llama_model_n_embd(self._model)
        context = Context(self._model, width, self.vocab.n_tokens, options, self._rules)
        return self._kept(context)

    def block_context(
        self, options: ContextOptions, beside: Context, block_size: int
    ) -> BlockContext:
        """A context for stages that draft blocks, beside the target's. Raises `LoadFailed`."""
        n_vocab = self.vocab.n_tokens
        return self._kept(BlockContext(self._model, n_vocab, options, beside, block_size))

    def _kept(self, context: AnyContext) -> AnyContext:
        self._stack.callback(context.close)  # so that contexts die before the weights
        return context

    def places(self, names: Iterable[str]) -> dict[str, str]:
        """Where tensors really lie: names of devices, "CPU" for all of the CPU's buffers. Tensors
        that are not loaded are left out."""
        return places(self._model, names)

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
