"""The Python interpreters of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path


def pythons(oldest: int = 10) -> dict[str, str]:
    """Version → path, from 3.`oldest` on, the oldest first: this one, those on PATH, and pyenv's."""
    candidates = [sys.executable, *(shutil.which(f"python3.{minor}") for minor in range(oldest, 20))]
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    candidates += [str(path) for path in sorted(root.glob("versions/*/bin/python"))]
    found: dict[tuple[int, ...], str] = {}
    for path in filter(None, candidates):
        code = "import sys; print('%d.%d' % sys.version_info[:2])"
        version = subprocess.run([path, "-c", code], capture_output=True, text=True).stdout.strip()
        if version and (key := tuple(map(int, version.split(".")))) >= (3, oldest):
            found.setdefault(key, path)
    return {".".join(map(str, key)): found[key] for key in sorted(found)}
