"""The picture of a report in README: ``python -m tests.browser.picture`` makes it anew from a real run.

It runs the tutorial's command (README's ``quickstart.sh``), and takes a picture of the page of its report, with the
run's folder shown as a user's. Needs torch, scikit-learn and Chromium.
"""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.browser.chromium import Browser, missing, started

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "images" / "report.png"
WIDTH, HEIGHT = 860, 690
LARGEST = 300_000


def page_of_a_real_run(folder: Path) -> str:
    """The tutorial's command, run in a folder, and its report as a page."""
    tutorial = (ROOT / "docs" / "tutorial" / "first-run.md").read_text(encoding="utf-8").replace("\\\n", "")
    (command,) = re.findall(r"^\$ hpc-elastic (run .*--kill-rank .*)$", tutorial, re.MULTILINE)
    (folder / "docs").symlink_to(ROOT / "docs")
    run = [sys.executable, "-m", "hpc_elastic", *command.split()]
    subprocess.run(run, cwd=folder, env=_environment(folder), check=True, timeout=300)
    (report,) = folder.glob("runs/*-train_digits-*/attempt-000/report.html")
    return report.read_text(encoding="utf-8").replace(str(folder), "/home/me/project")


def _environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(folder / "state")}


def take(browser: Browser, html: str, folder: Path) -> bytes:
    """A picture of the upper part of a page, as PNG."""
    page = folder / "page.html"
    page.write_text(html, encoding="utf-8")
    browser.open(page)
    browser.devtools(
        "Emulation.setDeviceMetricsOverride", width=WIDTH, height=HEIGHT, deviceScaleFactor=1, mobile=False
    )
    clip = {"x": 0, "y": 0, "width": WIDTH, "height": HEIGHT, "scale": 1}
    taken = browser.devtools("Page.captureScreenshot", format="png", clip=clip)
    browser.devtools("Emulation.clearDeviceMetricsOverride")
    return base64.b64decode(taken["data"])


def main() -> int:
    if why := missing():
        print(why, file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as name, started() as browser:
        PICTURE.write_bytes(take(browser, page_of_a_real_run(Path(name)), Path(name)))
    print(f"{PICTURE.relative_to(ROOT)}: {PICTURE.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
