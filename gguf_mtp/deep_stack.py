"""Calls with room for deep recursion in a library that is not ours.

llama.cpp's tokenizer and llguidance recurse with what they are given; where the stack ends, so does
the process. Knows nothing of either.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from gguf_mtp.errors import RequestError

__all__ = ["with_stack"]

T = TypeVar("T")
_lock = threading.Lock()


def with_stack(n_bytes: int, call: Callable[[], T]) -> T:
    """What `call` returns, called with a stack of `n_bytes`; only what it uses of them takes
    memory. One at a time. Raises what it raises, and `RequestError` where there is no such room."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    with _lock:
        usual = threading.stack_size(-(-n_bytes // 4096) * 4096)
        try:
            thread = threading.Thread(target=run, name="deep")
            thread.start()
        except RuntimeError:
            raise RequestError(f"cannot allocate a stack of {n_bytes} bytes") from None
        finally:
            threading.stack_size(usual)
        thread.join()
    if errors:
        raise errors[0]
    return results[0]
