"""The optional tier: training frameworks from the registry, in an environment of their own that uses our torch.

``python -m tests.check --tier frameworks`` asks for it; a plain ``pytest`` skips it, and downloads nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("accelerate", "lightning", "transformers")
_PIP_SECONDS = 600.0


def _make(folder: Path) -> None:
    """A virtual environment that has PACKAGES of its own, and everything else from this one: torch is not replaced."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True, timeout=120)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "base.pth").write_text(sysconfig.get_path("purelib") + "\n")
    subprocess.run([str(folder / "bin/pip"), "install", "-q", *PACKAGES], check=True, timeout=_PIP_SECONDS)


@pytest.fixture(scope="session")
def frameworks_python() -> str:
    """An interpreter that has the frameworks, and the torch of this environment."""
    if not os.environ.get("HPC_ELASTIC_REQUIRE_FRAMEWORKS"):
        pytest.skip("optional: python -m tests.check --tier frameworks")
    folder = ROOT / "build" / "frameworks"
    python = folder / "bin" / "python"
    probe = "import accelerate as a, lightning as l, torch, transformers as t; "
    probe += "print(a.__version__, l.__version__, t.__version__, torch.__file__)"
    if not python.exists() or subprocess.run([python, "-c", probe], capture_output=True).returncode != 0:
        _make(folder)
    found = subprocess.run([python, "-c", probe], capture_output=True, text=True, check=True, timeout=240).stdout
    print(f"accelerate, lightning, transformers, torch: {found}")
    assert sys.prefix in found, "torch was replaced"
    return str(python)
