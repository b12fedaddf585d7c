"""The browser of this machine, driven by Playwright: Chromium, its headless shell, or Chrome.

Playwright clicks only what is visible and not covered. Whatever the page complains of (errors, its
own policy) fails the test.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, ConsoleMessage, Dialog, sync_playwright

NAMES = (
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
)
PATIENCE_MS = 60_000.0
"""A bound against a page that hangs; a slow machine stays far below it."""


def command() -> str | None:
    """The browser of this machine, if it has one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def browser() -> Iterator[Browser]:
    """Runs `command()` without a window."""
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=command(),
            chromium_sandbox=False,  # tests may run as root
            args=["--disable-dev-shm-usage", "--disable-quic", "--disable-background-networking"],
        )
        try:
            yield started
        finally:
            started.close()


class Tab:
    """One tab with a storage of its own, or with that of the tab it stands `beside`. It says yes to
    what the page asks in a dialog, unless `agrees` is False; `asked` has what that was."""

    def __init__(self, started: Browser, beside: Tab | None = None) -> None:
        self._context = beside._context if beside else started.new_context()
        self.asked: list[str] = []
        self.agrees = True
        self._page = self._context.new_page()
        self._page.set_default_timeout(PATIENCE_MS)
        self._complaints: list[str] = []
        self._page.on("console", self._hear)
        self._page.on("pageerror", lambda error: self._complaints.append(str(error)))
        self._page.on("dialog", self._reply)
        self.look(900, 700)

    def _reply(self, dialog: Dialog) -> None:
        self.asked.append(dialog.message)
        if self.agrees:
            dialog.accept()
        else:
            dialog.dismiss()

    def _hear(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self._complaints.append(message.text)

    def close(self) -> None:
        self._context.close()

    def open(self, url: str) -> None:
        self._page.goto(url, wait_until="load")

    def look(self, width: int, height: int, *, dark: bool = False) -> None:
        """The size of the screen, and what the reader likes."""
        self._page.set_viewport_size({"width": width, "height": height})
        self._page.emulate_media(color_scheme="dark" if dark else "light")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        return self._page.evaluate(script)

    def wait(self, condition: str) -> None:
        """Until the expression is true."""
        self._page.wait_for_function(f"() => {condition}", polling=20)

    def text(self, selector: str) -> str:
        return self._page.locator(selector).first.inner_text()

    def click(self, selector: str) -> None:
        """A click on the first such element, scrolled to if need be; nothing may be over it."""
        self._page.locator(selector).first.click()

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self._page.keyboard.insert_text(text)

    def press(self, key: str) -> None:
        self._page.keyboard.press(key)

    def picture(self) -> bytes:
        """A PNG of the screen."""
        return self._page.screenshot()

    def complaints(self) -> list[str]:
        """What the page or the browser complained of since the last call."""
        self._page.evaluate("1")  # what is on its way has arrived by then
        found, self._complaints = self._complaints, []
        return found
