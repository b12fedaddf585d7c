"""Pictures of the web page for the documentation, of a real answer by the demo model.

python -m tests.support.screenshots docs
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.browser import Tab, browser
from tests.support.processes import process

LOOKS = {"web": (860, 560, False), "web-narrow-dark": (390, 700, True)}
QUESTIONS = ("What is the capital of France?", "What is a river?")


def main(folder: Path) -> None:
    options = (
        "--temp",
        "0",
        "--draft",
        "mtp",
        "--draft-min",
        "2",
        "--draft-max",
        "2",
        "--log",
        "off",
    )
    with process(*options) as running, browser() as started:
        for name, (width, height, dark) in LOOKS.items():
            tab = Tab(started)
            tab.look(width, height, dark=dark)
            tab.open(running.url.removesuffix("v1"))
            for selector in ("#settings-open", "#colours", "dialog button"):
                tab.click(selector)
            for n, question in enumerate(QUESTIONS, start=1):
                tab.click("#text")
                tab.type(question)
                tab.press("Enter")
                tab.wait(f"document.querySelectorAll('.assistant:not(.writing)').length === {n}")
            assert tab.complaints() == []
            (folder / f"{name}.png").write_bytes(tab.picture())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
