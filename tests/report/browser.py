"""A headless Chromium for tests, driven over its DevTools protocol on two pipes: nothing to install but the browser."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.limits import HANG

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING = f"no Chromium is installed (none of {', '.join(NAMES)} is on PATH); on Debian: apt-get install chromium"


def find_browser() -> str | None:
    """The path of a browser, if there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page in a browser of its own, with an empty profile; a context manager, which ends it.

    Args:
        program: the browser.
        size: of the window, CSS pixels.

    Attributes:
        requests: addresses that the page asked for.
        errors: exceptions of its scripts, and what it wrote to the console as an error.
    """

    def __init__(self, program: str, size: tuple[int, int] = (1400, 1000)) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="browser", ignore_cleanup_errors=True)
        their_in, self._out = os.pipe()
        self._in, their_out = os.pipe()
        # Out of the way of the numbers 3 and 4, which the browser reads from and writes to.
        ends = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64) for fd in (their_in, their_out)]
        arguments = [
            program, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
            "--disable-dev-shm-usage", "--disable-background-networking", "--remote-debugging-pipe",
            f"--user-data-dir={self._profile.name}", f"--window-size={size[0]},{size[1]}", "about:blank",
        ]  # fmt: skip

        def connect() -> None:
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        self._process = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            preexec_fn=connect, pass_fds=(3, 4), start_new_session=True,
        )  # fmt: skip
        for fd in (their_in, their_out, *ends):
            os.close(fd)
        self._received = b""
        self._number = 0
        self._session: str | None = None
        self.requests: list[str] = []
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride", width=size[0], height=size[1], deviceScaleFactor=1, mobile=False
        )

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the browser and all its processes, which are a process group of their own."""
        for fd in (self._in, self._out):
            os.close(fd)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(HANG)
        self._profile.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol, and its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def open(self, path: Path) -> None:
        """Load a file and wait until its scripts have run."""
        self.call("Page.navigate", url=path.as_uri())
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, f"{expression}: {result['exceptionDetails']}"
        return result["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Until a JavaScript expression is true."""
        end = time.monotonic() + HANG
        while not self.run(expression):
            assert time.monotonic() < end, f"never true: {expression}"
            time.sleep(0.02)

    def move(self, x: float, y: float) -> None:
        """The pointer to a place of the window."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def wheel(self, x: float, y: float, by: float) -> None:
        """Turn the wheel there."""
        self.call("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=by)

    def click(self, selector: str) -> None:
        """Click the middle of an element, with a pointer and not by its script."""
        box = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: 'center'}}); "
            "const b = e.getBoundingClientRect(); return [b.left + b.width / 2, b.top + b.height / 2]; })()"
        )
        self.move(*box)
        for what in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=what, x=box[0], y=box[1], button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self.call("Input.insertText", text=text)

    def screenshot(self, path: Path) -> None:
        """Of the whole page, as a PNG."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._in], [], [], HANG)
            assert ready, "the browser does not answer"
            chunk = os.read(self._in, 1 << 16)
            assert chunk, f"the browser has ended (exit code {self._process.poll()})"
            self._received += chunk
        first, _, self._received = self._received.partition(b"\0")
        message: dict[str, Any] = json.loads(first)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        details = event.get("params", {})
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(details["request"]["url"])
        elif event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(details["exceptionDetails"].get("exception", details["exceptionDetails"])))
        elif event.get("method") == "Log.entryAdded" and details["entry"]["level"] == "error":
            self.errors.append(details["entry"]["text"])
