"""llama.cpp's log lines as records of the logger `gguf_mtp.llama`, its errors as reasons."""

from __future__ import annotations

import logging
from typing import Any

import llama_cpp as L

log = logging.getLogger("gguf_mtp.llama")

_LEVELS = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.INFO, 4: logging.ERROR}
"""ggml's debug, info, warn and error -> ours. Its warnings are remarks on healthy files."""


@L.llama_log_callback  # type: ignore[untyped-decorator]
def forward_log(level: int, text: bytes, _user: Any) -> None:
    line = text.decode(errors="replace").rstrip()  # a piece of a token may be cut UTF-8
    if line:
        log.log(_LEVELS.get(level, logging.DEBUG), "%s", line)


class Errors(logging.Filter):
    """Within it, what llama.cpp logs as an error is kept instead of shown: the caller raises it."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.ERROR:
            return True
        self.lines.append(record.getMessage())
        return False

    def __enter__(self) -> Errors:
        log.addFilter(self)
        return self

    def __exit__(self, *_: object) -> None:
        log.removeFilter(self)

    def reason(self) -> str:
        """The first error: later ones only say that loading failed."""
        return self.lines[0] if self.lines else "llama.cpp gave no reason"
