"""llama.cpp's own quantisation of a GGUF file, as a program: the second step of the two-step way.

python bench/llama_quantize.py IN.gguf OUT.gguf FILE_TYPE N_THREADS
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import llama_cpp as L

_ERROR = 4  # GGML_LOG_LEVEL_ERROR


@L.llama_log_callback  # type: ignore[untyped-decorator]
def _log(level: int, text: bytes, _user: Any) -> None:
    if level == _ERROR:
        sys.stderr.write(text.decode(errors="replace"))


def main(source: str, out: str, file_type: str, n_threads: str) -> None:
    L.llama_log_set(_log, ctypes.c_void_p(0))
    params = L.llama_model_quantize_default_params()
    params.ftype, params.nthread = int(file_type), int(n_threads)
    sys.exit(L.llama_model_quantize(source.encode(), out.encode(), params))


if __name__ == "__main__":
    main(*sys.argv[1:])
