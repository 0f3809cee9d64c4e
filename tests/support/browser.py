"""A headless Chromium, spoken to over its DevTools pipe: nothing listens on any port."""

import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from base64 import b64decode
from itertools import count

import pytest

from support.guard import GUARD_SECONDS

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe",
)  # fmt: skip


def require_chromium():
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip("no Chromium here (Debian: apt install chromium)")
    return program


def _pipe():
    """A pipe whose ends are not among the numbers that the browser wants."""
    ends = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return high


class Browser:
    """One page at a time. `console` has what it complained of, `requests` the addresses that it asked for."""

    def __init__(self):
        program = require_chromium()
        self._folder = tempfile.TemporaryDirectory(prefix="evenstep-chromium-", ignore_cleanup_errors=True)
        to_read, self._write = _pipe()
        self._read, to_write = _pipe()
        # DevTools reads from 3 and writes to 4.
        script = f'exec {program} "$@" 3<&{to_read} 4>&{to_write} {to_read}<&- {to_write}>&-'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", *ARGUMENTS, f"--user-data-dir={self._folder.name}", "about:blank"],
            pass_fds=(to_read, to_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_read)
        os.close(to_write)
        self._numbers, self._buffer = count(1), b""
        self.console, self.requests = [], []
        (page,) = [each for each in self.ask("Target.getTargets")["targetInfos"] if each["type"] == "page"]
        self._session = self.ask("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def open(self, path, *, width=1280, height=900, dark=False, phone=False):
        self.console.clear()
        self.requests.clear()
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = "dark" if dark else "light"
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.ask("Page.navigate", url=path.as_uri())
        self.wait_for("document.body && document.body.dataset.ready === 'yes'")

    def evaluate(self, expression):
        """The value of a JavaScript expression; of a promise, what it comes to."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, condition):
        """Until it holds: asked again each time that the page has drawn a frame."""
        frame = "new Promise(resolve => setTimeout(resolve, 20))"
        for _ in range(1500):
            if self.evaluate(condition):
                return
            self.evaluate(frame)
        raise AssertionError(f"it never came to {condition}")

    def press(self, key):
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key)

    def screenshot(self, path, *, whole=True):
        picture = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(b64decode(picture["data"]))

    def ask(self, method, **parameters):
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if not method.startswith("Target."):
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self._heed(answer)

    def _next(self):
        while b"\0" not in self._buffer:
            data = os.read(self._read, 1 << 20)
            assert data, "Chromium has ended"
            self._buffer += data
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)

    def _heed(self, message):
        about = message.get("params", {})
        if message["method"] == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        elif message["method"] == "Runtime.exceptionThrown":
            self.console.append(about["exceptionDetails"]["text"])
        elif message["method"] == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            self.console.append(str(about["args"]))
        elif message["method"] == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.console.append(about["entry"]["text"])

    def close(self):
        os.write(self._write, json.dumps({"id": 0, "method": "Browser.close"}).encode() + b"\0")
        self._process.wait(timeout=GUARD_SECONDS)
        os.close(self._write)
        os.close(self._read)
        self._folder.cleanup()
