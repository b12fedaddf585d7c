"""The forms of a server's log; a module of its own, so that `--help` need not load the rest."""

from __future__ import annotations

from enum import Enum


class LogFormat(str, Enum):
    """How a request is logged; `auto`: as text on a terminal, as JSON elsewhere."""

    auto = "auto"
    text = "text"
    json = "json"
