"""A file's first load, in a process of its own: `python -m gguf_mtp.llama.first_load < request`.

What is wrong with a file may end the process inside llama.cpp, so it ends this one. Request: one
JSON object; answer: a line for each step that begins, then "done", or "refused" with the reason.
`loading.first_load` asks and reads.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import numpy as np

from gguf_mtp.child import bound_memory
from gguf_mtp.errors import GgufMtpError
from gguf_mtp.llama.context_options import ContextOptions
from gguf_mtp.llama.model import Model, ModelOptions
from gguf_mtp.llama.vocab import Vocab
from gguf_mtp.offload.directives import LoadParams
from gguf_mtp.types import Rows

__all__ = ["DONE", "REFUSED", "load"]

DONE, REFUSED = "done", "refused"

_ON_CPU = LoadParams((), 0, (), ())
_DATA = 8 << 30
"""Bytes that this process may take; a mapped file does not count. A header can ask for any."""
_TEXT = "".join(map(chr, range(1, 256))) + " The 7 cats'll say 你好, \U0001f642\r\n\n  \t"
_OPTIONS = ContextOptions(n_ctx=64, n_seq=1, n_batch=8, n_outputs=2, n_threads=1)


def load(path: str, load_mtp: bool, has_trunk: bool, has_weights: bool) -> None:
    """Loads a file on the CPU, reads and writes a text, makes contexts, and decodes two rows.

    `has_trunk`: it is more than an MTP block. Without `has_weights` everything is made, nothing
    allocated or decoded. Raises `GgufMtpError` for what llama.cpp refuses in words.
    """
    print("loading it", flush=True)
    mode = "mmap" if has_weights else "none"
    options = ModelOptions(
        load_mtp=load_mtp,
        load_params=_ON_CPU,
        load_mode=mode,
        no_alloc=not has_weights,
        repack=False,
    )
    with Model(path, options) as model:
        print("reading a text with its vocabulary", flush=True)
        _read(model.vocab)
        hidden = None
        if has_trunk:
            hidden = _decode(model, has_weights, hidden=load_mtp)
        if load_mtp:
            rows = np.zeros((2, model.n_hidden), np.float32) if hidden is None else hidden
            _decode_block(model, rows, has_weights)


def _read(vocab: Vocab) -> None:
    for parse_special in (True, False):
        for token in vocab.tokenize(_TEXT, add_special=True, parse_special=parse_special):
            vocab.piece(token)


def _decode(model: Model, has_weights: bool, hidden: bool) -> Any:
    print("making a context", flush=True)
    context = model.context(replace(_OPTIONS, hidden=hidden))
    if not has_weights:
        return None
    print("decoding two tokens", flush=True)
    return context.decode([Rows(0, 0, [0, model.vocab.n_tokens - 1], 2)]).outputs[0].hidden


def _decode_block(model: Model, rows: Any, has_weights: bool) -> None:
    print("making a context for its MTP block", flush=True)
    context = model.context(replace(_OPTIONS, is_mtp=True))
    if has_weights:
        print("decoding two tokens with its MTP block", flush=True)
        context.decode([Rows(0, 1, [0, model.vocab.n_tokens - 1], 2, rows)])


if __name__ == "__main__":
    bound_memory("RLIMIT_DATA", _DATA)
    try:
        load(**json.load(sys.stdin))
    except GgufMtpError as error:
        print(REFUSED, json.dumps(str(error)), flush=True)
    else:
        print(DONE, flush=True)
