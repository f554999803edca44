"""A headless Chromium, driven through chromedriver by WebDriver's plain HTTP."""

from __future__ import annotations

import base64
import json
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

PACKAGES = ("chromium", "chromium-driver", "fonts-dejavu-core")
_OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)
_START = 90.0
KEYS = {"Tab": "\ue004", "Enter": "\ue007", "Escape": "\ue00c", "Right": "\ue014"}


def missing() -> str:
    """Why no browser can be started; empty where one can."""
    lacking = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"{' and '.join(lacking)} not installed (python -m tests.browser.chromium install)" if lacking else ""


class Browser:
    """One window."""

    def __init__(self, port: int, session: str) -> None:
        self._port = port
        self._path = f"/session/{session}"

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """One command of WebDriver's."""
        return _request(self._port, method, f"{self._path}{path}", body)

    def devtools(self, command: str, **parameters: Any) -> Any:
        """One command of the DevTools protocol."""
        return self.call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def open(self, page: Path) -> None:
        """Load a file, and wait until it has loaded."""
        self.call("POST", "/url", {"url": page.as_uri()})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value of a script's ``return``."""
        return self.call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def press(self, *keys: str) -> None:
        """Keys, one after the other, by their names in `KEYS`."""
        actions = [{"type": kind, "value": KEYS[key]} for key in keys for kind in ("keyDown", "keyUp")]
        self.call("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def click(self, selector: str) -> None:
        """A click with the mouse on the first element that is found."""
        element = self.call("POST", "/element", {"using": "css selector", "value": selector})
        self.call("POST", f"/element/{next(iter(element.values()))}/click", {})

    def size(self, width: int, height: int) -> None:
        """The page's own, in pixels."""
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    def prefer(self, scheme: str) -> None:
        """``light`` or ``dark``."""
        self.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path: Path) -> bytes:
        """What is seen, as PNG."""
        picture = base64.b64decode(self.call("GET", "/screenshot"))
        path.write_bytes(picture)
        return picture

    def print_to(self, path: Path) -> bytes:
        """The page on paper."""
        document = base64.b64decode(self.devtools("Page.printToPDF", printBackground=False)["data"])
        path.write_bytes(document)
        return document

    def log(self) -> list[dict[str, Any]]:
        """What the console said since it was last asked: refused resources and broken policies too."""
        found: list[dict[str, Any]] = self.call("POST", "/se/log", {"type": "browser"})
        return found


@contextmanager
def started() -> Iterator[Browser]:
    """A browser with a fresh profile, and no one left of it afterwards."""
    with tempfile.TemporaryDirectory(prefix="hpc-elastic-browser-", ignore_cleanup_errors=True) as profile:
        log = Path(profile) / "driver.log"
        with open(log, "wb") as output:
            driver = subprocess.Popen(
                ["chromedriver", "--port=0"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            port = _wait_for_port(log, driver)
            session = _request(port, "POST", "/session", {"capabilities": {"alwaysMatch": _capabilities(profile)}})
            browser = Browser(port, session["sessionId"])
            try:
                yield browser
            finally:
                browser.call("DELETE", "")
        finally:
            driver.send_signal(signal.SIGTERM)
            try:
                driver.wait(10)
            except subprocess.TimeoutExpired:
                driver.kill()
                driver.wait()


def _capabilities(profile: str) -> dict[str, Any]:
    options = {"binary": shutil.which("chromium"), "args": [*_OPTIONS, f"--user-data-dir={profile}/profile"]}
    return {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}


def _wait_for_port(log: Path, driver: subprocess.Popen[bytes]) -> int:
    deadline = time.monotonic() + _START
    while time.monotonic() < deadline and driver.poll() is None:
        _, found, rest = log.read_text(errors="replace").partition("successfully on port ")
        if found and "." in rest:
            return int(rest.partition(".")[0])
        time.sleep(0.02)
    raise RuntimeError(f"chromedriver did not start:\n{log.read_text(errors='replace')}")


def _request(port: int, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        payload = None if body is None else json.dumps(body)
        connection.request(method, path, payload, {"Content-Type": "application/json"})
        answer = json.loads(connection.getresponse().read())
    finally:
        connection.close()
    value = answer["value"]
    if isinstance(value, dict) and "error" in value:
        raise RuntimeError(f"{method} {path}: {value['error']}: {value.get('message', '')}")
    return value


if __name__ == "__main__":
    import sys

    from tests.rigs.debian_packages import install

    if sys.argv[1:] != ["install"]:
        sys.exit("usage: python -m tests.browser.chromium install")
    install(PACKAGES)
