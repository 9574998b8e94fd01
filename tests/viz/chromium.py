"""A headless Chromium, spoken to over a pipe in its DevTools protocol: nothing to install but the browser."""

import base64
import itertools
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--remote-debugging-pipe",
)  # fmt: skip
_DEADLINE = 60
"""Seconds that an answer may take."""


def find() -> str | None:
    """The browser's path; None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page of a browser of its own.

    Args:
        program: path of Chromium.
        profile: an empty folder for its profile.

    Attributes:
        requests: addresses that the page has asked for.
        errors: what the page's scripts have thrown or its console has reported as an error.
    """

    def __init__(self, program: str, profile: Path) -> None:
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()

        def place() -> None:  # Chromium reads commands on 3 and writes answers on 4
            read, write = os.dup(theirs_in), os.dup(theirs_out)
            os.dup2(read, 3)
            os.dup2(write, 4)

        self._process = subprocess.Popen(
            [program, *_QUIET, f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=place, pass_fds=(3, 4), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._out, self._in = self._pipes = (ours_out, ours_in)
        self._numbers, self._buffer = itertools.count(1), b""
        self._session: str | None = None
        self.requests: list[str] = []
        self.errors: list[str] = []
        target = next(each for each in self._call("Target.getTargets")["targetInfos"] if each["type"] == "page")
        attached = self._call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")

    def open(
        self, page: Path, width: int = 1200, height: int = 900, scheme: str = "light", touch: bool = False
    ) -> None:
        """Load a file, in a window of that size (CSS pixels) and under a light or dark colour scheme."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._call("Emulation.setTouchEmulationEnabled", enabled=touch)
        self._loaded = False
        self._call("Page.navigate", url=page.resolve().as_uri())
        while not self._loaded:
            self._receive()

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(f"{expression}: {answer['exceptionDetails']['exception'].get('description')}")
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        """The visible text of the first element that matches."""
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")

    def box(self, selector: str) -> tuple[float, float, float, float]:
        """Left, top, width and height of the first element that matches, scrolled into the middle of the window."""
        return tuple(
            self.evaluate(
                f"(() => {{ const found = document.querySelector({json.dumps(selector)});"
                "found.scrollIntoView({block: 'center'}); const box = found.getBoundingClientRect();"
                "return [box.left, box.top, box.width, box.height]; })()"
            )
        )

    def mouse(self, kind: str, x: float, y: float, clicks: int = 0) -> None:
        """Move (``mouseMoved``), press (``mousePressed``) or release (``mouseReleased``) at a place in the window."""
        button = {"button": "left", "buttons": 1, "clickCount": clicks} if clicks else {}
        self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Press at one place, move, release at another."""
        self.mouse("mousePressed", *start, clicks=1)
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=end[0], y=end[1], button="left", buttons=1)
        self.mouse("mouseReleased", *end, clicks=1)

    def key(self, name: str) -> None:
        """Press and release a key, by its name in DOM events."""
        text = {"text": name} if len(name) == 1 else {}
        self._call("Input.dispatchKeyEvent", type="keyDown", key=name, **text)
        self._call("Input.dispatchKeyEvent", type="keyUp", key=name)

    def screenshot(self, file: Path, whole: bool = False) -> Path:
        """A PNG of the window, or of the whole page."""
        answer = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(answer["data"]))
        return file

    def close(self) -> None:
        """End the browser."""
        for descriptor in self._pipes:
            os.close(descriptor)
        self._pipes = ()  # a number is another file's once it is closed
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        def late(*_: object) -> None:
            raise TimeoutError(f"Chromium has not answered within {_DEADLINE} s")

        before = signal.signal(signal.SIGALRM, late)
        signal.alarm(_DEADLINE)
        try:
            while b"\0" not in self._buffer:
                received = os.read(self._in, 1 << 20)
                if not received:
                    raise ConnectionError("Chromium has ended")
                self._buffer += received
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, event: str | None, facts: dict[str, Any]) -> None:
        if event == "Page.loadEventFired":
            self._loaded = True
        elif event == "Network.requestWillBeSent":
            self.requests.append(facts["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.errors.append(facts["exceptionDetails"].get("exception", {}).get("description", "exception"))
        elif event == "Log.entryAdded" and facts["entry"]["level"] == "error":
            self.errors.append(facts["entry"]["text"])
