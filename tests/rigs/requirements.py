"""Tests whose rig this machine may lack: skipped with the reason, failed in CI."""

from __future__ import annotations

import os
import shutil

import pytest


def require(rig: str, reason: str | None) -> None:
    """Skip the test where there is a `reason` why `rig` can't run; in CI, fail it."""
    if not reason:
        return
    if os.environ.get("CI", "").lower() in ("true", "1"):
        pytest.fail(f"{rig} can't run: {reason}", pytrace=False)
    pytest.skip(f"{rig} can't run: {reason}")


def missing_programs(*programs: str) -> str | None:
    """Those that are not on PATH, as a reason."""
    missing = [program for program in programs if shutil.which(program) is None]
    return f"{' and '.join(missing)}: not installed" if missing else None
