"""Ctrl-C while a command still imports its modules ends it without a traceback."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

STEPS = 12
SCRIPT = """
import sys
sys.argv = ['/usr/bin/hpc-elastic', 'list', '--no-slurm']
import hpc_elastic.cli  # before that, Python alone could answer
print('begun', flush=True)
from hpc_elastic.cli.main import console_main
console_main()
"""


def began(tmp_path: Path) -> subprocess.Popen[str]:
    """The command as its installed script does it."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    return process


def test_ctrl_c_during_the_start(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    start = time.monotonic()
    began(tmp_path).communicate(timeout=60)
    whole = time.monotonic() - start
    codes = set()
    for step in range(STEPS):
        process = began(tmp_path)
        time.sleep(whole * step / STEPS)  # the moment is the case
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        codes.add(process.returncode)
        assert "Traceback" not in err, f"after {step} of {STEPS} parts of the start"
    assert codes <= {0, 130, -signal.SIGINT}
    if codes == {0}:
        pytest.fail("every run had ended before its signal came")
