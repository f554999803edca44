"""What of the in-process restart group needs no torch, on every Python that is installed here."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "rigs" / "inprocess_without_torch.py"
CASES = 10


def pythons() -> dict[str, str]:
    """Version → path, from 3.10 on: this one, those on PATH, and pyenv's."""
    candidates = [sys.executable, *(shutil.which(f"python3.{minor}") for minor in range(10, 20))]
    candidates += [str(path) for path in sorted(Path.home().glob(".pyenv/versions/*/bin/python"))]
    found: dict[str, str] = {}
    for path in filter(None, candidates):
        code = "import sys; print('%d.%d' % sys.version_info[:2])"
        version = subprocess.run([path, "-c", code], capture_output=True, text=True).stdout.strip()
        if version and tuple(map(int, version.split("."))) >= (3, 10):
            found.setdefault(version, path)
    return found


def test_interruptions_and_the_probe_on_every_python() -> None:
    found = pythons()
    running = {
        version: subprocess.Popen(
            [path, "-I", str(SCRIPT)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for version, path in found.items()
    }
    for version, process in running.items():
        output, _ = process.communicate(timeout=400)
        assert process.returncode == 0, f"Python {version}\n{output}"
        assert output.count(": ok\n") == CASES, f"Python {version}\n{output}"
