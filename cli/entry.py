"""Where the command `gguf-mtp` begins: before anything that takes long to import.

Ctrl+C in the first tenth of a second would otherwise print an import's traceback.
"""

from __future__ import annotations

import os
import signal
import sys

__all__ = ["main"]


def main() -> None:
    """See `app.main`."""
    if os.name != "posix":
        sys.exit("error: gguf-mtp runs on Linux and macOS; on Windows install it in WSL 2")
    taken = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from .app import main as run

    signal.signal(signal.SIGINT, taken)
    run()
