"""The user's shell commands in the batch script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpc_elastic.errors import UsageError
from hpc_elastic.slurm.sbatch import SbatchOptions, render_script
from hpc_elastic.submission.parameters import ScriptLines
from hpc_elastic.submission.script_lines import with_lines


def script(tmp_path: Path, *command: str) -> str:
    return render_script(SbatchOptions(nodes="1"), run_dir=str(tmp_path), command=command)


def test_without_any_the_script_is_as_it_was(tmp_path: Path) -> None:
    text = script(tmp_path, "/bin/true")
    assert with_lines(text, ScriptLines()) == text


def test_they_stand_around_the_run_and_its_code_is_the_scripts(tmp_path: Path) -> None:
    text = script(tmp_path, "/bin/bash", "-c", 'echo "run $WORD"; exit 75')
    lines = ScriptLines(setup=("export WORD=@HERE@", "echo before"), teardown=("echo after",))
    done = subprocess.run(["bash", "-c", with_lines(text, lines)], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("before\nrun @HERE@\nafter\n", 75), done.stderr


def test_a_set_up_that_fails_is_the_users_matter(tmp_path: Path) -> None:
    text = with_lines(script(tmp_path, "/bin/true"), ScriptLines(setup=("false || exit 3",)))
    assert subprocess.run(["bash", "-c", text], check=False).returncode == 3


SUPERVISOR = """
import os, signal, sys, time
came = [] if signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN else ["an interpreter that starts would have died"]
for number in (signal.SIGUSR2, signal.SIGTERM):
    signal.signal(number, lambda number, frame: came.append(signal.Signals(number).name))
os.kill(os.getppid(), signal.SIGUSR2)
while not came: time.sleep(0.01)
os.kill(os.getppid(), signal.SIGTERM)
while len(came) < 2: time.sleep(0.01)
print(*came, flush=True)
sys.exit(75)
"""


def test_slurms_signals_reach_the_run_where_the_shell_stays(tmp_path: Path) -> None:
    text = with_lines(script(tmp_path, sys.executable, "-c", SUPERVISOR), ScriptLines(teardown=("echo after",)))
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=False, timeout=60)
    assert (done.stdout, done.returncode) == ("SIGUSR2 SIGTERM\nafter\n", 75), done.stderr


def test_another_template_has_no_place_for_them() -> None:
    with pytest.raises(UsageError, match="no place in this template"):
        with_lines("#!/bin/bash\necho\n", ScriptLines(setup=("true",)))
