"""A headless Chromium, spoken to over a pipe in the DevTools protocol; no packages needed.

Messages are JSON, each ended by a zero byte: the browser reads them on its file descriptor 3 and answers on 4.
"""

import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
LIMIT_S = 60.0
_START = "import os, sys; [os.dup2(int(sys.argv[k]), k + 2) for k in (1, 2)]; os.execv(sys.argv[3], sys.argv[3:])"
_FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
_FLAGS += ["--hide-scrollbars", "--remote-debugging-pipe"]


def found() -> str | None:
    """The path of a Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def showing(text: str, folder: Path) -> Iterator["Browser"]:
    """A browser that has opened a page with this text, at `path` in this folder."""
    page = Browser(folder)
    try:
        page.path.write_text(text, encoding="utf-8")
        page.open(page.path)
        yield page
    finally:
        page.close()


class Browser:
    """One page of a browser. `errors`: exceptions of scripts, `requests`: all requested addresses."""

    def __init__(self, folder: Path, width: int = 1280, height: int = 800) -> None:
        to_browser, mine = os.pipe()
        answers, theirs = os.pipe()
        for fd in (to_browser, theirs):
            os.set_inheritable(fd, True)
        command = [found() or "", *_FLAGS, f"--user-data-dir={folder / 'profile'}", f"--window-size={width},{height}"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(to_browser), str(theirs), *command],
            pass_fds=(to_browser, theirs),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(theirs)
        self.path = folder / "page.html"
        self._in, self._out, self._buffer, self._count = mine, answers, b"", 0
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._loaded = 0
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._in, data) :]
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result

    def _next(self) -> dict[str, Any]:
        """The next message; notes errors and requests."""
        end = time.monotonic() + LIMIT_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._out], [], [], max(0.0, end - time.monotonic()))
            data = os.read(self._out, 1 << 20) if ready else b""
            if not data:
                raise TimeoutError("the browser does not answer")
            self._buffer += data
        raw, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(raw)
        method, parameters = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(parameters["exceptionDetails"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Page.loadEventFired":
            self._loaded += 1
        return message

    def open(self, path: Path) -> None:
        """Load a file and wait until it has been drawn."""
        before = self._loaded
        self.call("Page.navigate", url=path.as_uri())
        while self._loaded == before:
            self._next()
        self.frame()

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"])[:2000])
        return answer["result"].get("value")

    def frame(self) -> None:
        """Wait until two frames have been drawn."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """`mouseMoved`, `mousePressed`, `mouseReleased` or `mouseWheel` at a point of the window."""
        if kind in ("mousePressed", "mouseReleased"):
            more = {"button": "left", "clickCount": 1, **more}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def key(self, key: str) -> None:
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=key if len(key) == 1 else "")
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.frame()

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)
        self.frame()

    def place(self, kind: str, stage: int, mb: int) -> list[float]:
        """The position of an op of our page in the window."""
        script = f"""(() => {{
          const box = document.getElementById("time").getBoundingClientRect();
          for (const row of zbc.rows) for (let i = 0; i < row.n; i++)
            if (D.kinds[row.k[i]].op === "{kind}" && row.s[i] === {stage} && row.m[i] === {mb})
              return [box.left + zbc.xOf((row.start[i] + row.end[i]) / 2), box.top + zbc.tops()[row.index] + 4];
        }})()"""
        found: list[float] = self.run(script)
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
