"""The GPU tier where there is no GPU: it skips, says why, and writes that down."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.torch
def test_without_a_gpu_all_is_skipped_with_the_reason(tmp_path: Path) -> None:
    record = tmp_path / "seen.md"
    done = subprocess.run(
        [sys.executable, "-m", "tests.check", "--tier", "gpu", "--record", str(record)],
        cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^0 passed, 0 failed, \d\d skipped$", done.stdout, re.MULTILINE), done.stdout
    assert re.search(r"^ +\d\d skipped: needs a GPU", done.stdout, re.MULTILINE), done.stdout
    table = record.read_text()
    assert table in done.stdout
    assert "| not run | needs a GPU" in table
