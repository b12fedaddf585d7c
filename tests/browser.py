"""A headless Chromium for tests, driven through the pipe of its own protocol (DevTools).

Clicks and keys go through the browser's input, so what is hidden or covered cannot be clicked.
Whatever the page complains of (errors, its own policy) fails the test.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "google-chrome")
PATIENCE_S = 20.0


def command() -> str | None:
    """The browser of this machine, if it has one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Pipe:
    """The protocol: JSON messages that end with a zero byte, on file descriptors 3 and 4."""

    def __init__(self, profile: Path) -> None:
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        arguments = [
            "--remote-debugging-pipe",
            "--no-sandbox",  # tests may run as root
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--hide-scrollbars",
            f"--user-data-dir={profile}",
        ]
        redirect = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self.process = subprocess.Popen(
            ["bash", "-c", redirect, command() or "", *arguments],
            pass_fds=(theirs_in, theirs_out),
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._rest = b""
        self._n_sent = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **params: Any) -> Any:
        self._n_sent += 1
        message: dict[str, Any] = {"id": self._n_sent, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + PATIENCE_S
        while True:
            answer = self._read(end)
            if answer.get("id") != self._n_sent:
                self.events.append(answer)
            elif "error" in answer:
                raise AssertionError(f"{method}: {answer['error']}")
            else:
                return answer["result"]

    def _read(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(end - time.monotonic(), 0))
            assert ready, "the browser does not answer"
            data = os.read(self._in, 1 << 20)
            assert data, "the browser has ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        found = json.loads(message)
        assert isinstance(found, dict)
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        os.close(self._in)
        os.close(self._out)


class Tab:
    """One tab with a storage of its own."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._context = pipe.call("Target.createBrowserContext")["browserContextId"]
        target = pipe.call(
            "Target.createTarget", url="about:blank", browserContextId=self._context
        )["targetId"]
        attached = pipe.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.look(900, 700)

    def call(self, method: str, **params: Any) -> Any:
        return self._pipe.call(method, self._session, **params)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def look(self, width: int, height: int, *, dark: bool = False) -> None:
        """The size of the screen, and what the reader likes."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        done = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in done, (script, done)
        return done["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until the expression is true."""
        end = time.monotonic() + PATIENCE_S
        while not self.run(condition):
            assert time.monotonic() < end, (condition, self.run("document.body.innerText"))
            time.sleep(0.02)

    def text(self, selector: str) -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    def click(self, selector: str) -> None:
        """A click where the element is, scrolled to if need be; nothing may be over it."""
        found = self.run(
            f"""(() => {{
                const e = document.querySelector({json.dumps(selector)});
                e.scrollIntoView({{block: 'nearest'}});
                const r = e.getBoundingClientRect();
                const [x, y] = [r.x + r.width / 2, r.y + r.height / 2];
                const over = document.elementFromPoint(x, y);
                return [x, y, r.width > 0 && (over === e || e.contains(over))];
            }})()"""
        )
        x, y, is_free = found
        assert is_free, f"{selector} cannot be clicked"
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int) -> None:
        named = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **named, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **named)

    def picture(self) -> bytes:
        """A PNG of the screen."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def complaints(self) -> list[str]:
        """What the page or the browser complained of since the last call."""
        self.run("1")  # what is on its way has arrived by then
        events = [e for e in self._pipe.events if e.get("sessionId") == self._session]
        self._pipe.events.clear()
        found = []
        for event in events:
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(event["params"]["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded":
                entry = event["params"]["entry"]
                if entry["level"] in ("error", "warning"):
                    found.append(entry["text"])
        return found


@contextmanager
def browser(profile: Path) -> Iterator[Pipe]:
    pipe = Pipe(profile)
    try:
        yield pipe
    finally:
        pipe.close()
