"""The user's shell commands in the batch script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpc_elastic.errors import UsageError
from hpc_elastic.launch.submit_job import render_script
from hpc_elastic.options.sbatch import SbatchOptions, ScriptLines


def script(tmp_path: Path, lines: ScriptLines | None, *command: str, template: str | None = None) -> str:
    options = SbatchOptions(nodes="1")
    return render_script(options, run_dir=str(tmp_path), command=command, template=template, lines=lines)


def test_without_any_the_script_is_as_it_was(tmp_path: Path) -> None:
    assert script(tmp_path, ScriptLines(), "/bin/true") == script(tmp_path, None, "/bin/true")


def test_they_stand_around_the_run_and_its_code_is_the_scripts(tmp_path: Path) -> None:
    lines = ScriptLines(setup=("export WORD=@HERE@", "echo before"), teardown=("echo after",))
    text = script(tmp_path, lines, "/bin/bash", "-c", 'echo "run $WORD"; exit 75')
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("before\nrun @HERE@\nafter\n", 75), done.stderr


def test_a_set_up_that_fails_is_the_users_matter(tmp_path: Path) -> None:
    text = script(tmp_path, ScriptLines(setup=("false || exit 3",)), "/bin/true")
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
    text = script(tmp_path, ScriptLines(teardown=("echo after",)), sys.executable, "-c", SUPERVISOR)
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=False, timeout=60)
    assert (done.stdout, done.returncode) == ("SIGUSR2 SIGTERM\nafter\n", 75), done.stderr


def test_another_template_has_no_place_for_them(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no place in this template"):
        script(tmp_path, ScriptLines(setup=("true",)), "/bin/true", template="#!/bin/bash\necho @COMMAND@\n")
