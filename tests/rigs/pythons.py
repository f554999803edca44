"""The Python interpreters of this machine."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path


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
