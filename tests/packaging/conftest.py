"""The sdist, and the wheel that is built from it: once for all tests."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs.requirements import require

ROOT = Path(__file__).resolve().parents[2]


def require_module(name: str, package: str = "") -> None:
    missing = importlib.util.find_spec(name) is None
    require(name, f"pip install {package or name}, or hpc_elastic[packaging]" if missing else None)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """``wheel`` and ``sdist``."""
    require_module("build")
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist}
