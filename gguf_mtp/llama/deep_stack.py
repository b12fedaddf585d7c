"""Calls with room for deep recursion, and how deep a text makes llama.cpp's tokenizer go.

llama.cpp cuts text into words with `std::regex`, which calls itself for every character of a match
(`unicode_regex_split_stl`): a few ten thousand letters or spaces in a row overflow a thread's usual
stack of 8 MiB, and end the process. Knows nothing of vocabularies.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import TypeVar

from gguf_mtp.errors import RequestError

__all__ = ["deepest", "with_stack"]

T = TypeVar("T")

# What one match may reach over, whatever the model's expressions are: words and what stands between
# them, white space, signs, digits. Characters beyond ASCII may be of any kind.
_RUNS = tuple(
    re.compile(f"[{kinds}]+") for kinds in (r"A-Za-z \x80-\U0010ffff", r"\s", r"^A-Za-z0-9 ", r"\d")
)
_lock = threading.Lock()


def deepest(text: str) -> int:
    """No match is longer than this, in characters."""
    return max(
        (match.end() - match.start() for run in _RUNS for match in run.finditer(text)), default=0
    )


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
