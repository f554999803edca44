"""``hpc-elastic doctor`` as a person calls it: lines, exit codes, what is kept, and that submit then warns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.rigs.local_run import ROOT

FAKE = """#!/bin/sh
case "$*" in
  *config*) echo "SLURM_VERSION = 22.05.8"; echo "KillWait = 5 sec" ;;
  *partition*) echo "PartitionName=main Default=YES MaxTime=UNLIMITED State=UP TotalNodes=4" ;;
esac
"""


def hpc_elastic(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {
        "PATH": f"{folder / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin",
        "HOME": str(folder),
        "XDG_STATE_HOME": str(folder / "state"),
        "PYTHONPATH": str(ROOT),
        "USER": "ann",
        "LANG": os.environ.get("LANG", "C.UTF-8"),
    }
    command = [sys.executable, "-m", "hpc_elastic", *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


def test_a_person_sees_lines_the_code_says_whether_there_is_a_problem_and_submit_warns(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("scontrol", "sacct", "sacctmgr", "sbatch"):
        (tmp_path / "bin" / name).write_text(FAKE)
        (tmp_path / "bin" / name).chmod(0o755)
    runs = ("--runs-dir", str(ROOT / "runs"), "--python", sys.executable)
    good = hpc_elastic(tmp_path, "doctor", "--json", *runs)
    levels = {one["check"]: one["level"] for one in json.loads(good.stdout)["findings"]}
    assert levels["slurm.version"] == "ok"
    assert levels["slurm.kill-wait"] == "warning"
    assert not any(check.startswith("nodes.") for check in levels), "without --nodes nothing is submitted"
    assert (good.returncode == 1) == ("problem" in levels.values())
    bad = hpc_elastic(tmp_path, "doctor", "--nodes", "5", "--save", *runs)
    assert bad.returncode == 1
    (line,) = [line for line in bad.stdout.splitlines() if " partition.nodes: " in line]
    assert line.startswith("problem ")
    assert "gives a job at most 4 nodes" in line
    assert line.endswith("--nodes 4, or another --partition")
    # This sbatch prints no job id.
    (refused,) = [line for line in bad.stdout.splitlines() if " nodes.job: " in line]
    assert refused.startswith("problem  nodes.job: "), refused
    assert "a run would not begin either" in refused
    (tmp_path / "train.py").touch()
    options = ("--cluster", "slurm", "--dry-run", "--allow-local-runs-dir")
    warned = hpc_elastic(tmp_path, "submit", *options, "train.py")
    assert warned.returncode == 0, warned.stderr
    assert "hpc-elastic doctor found: partition.nodes: main gives a job at most 4 nodes" in warned.stderr
    misuse = hpc_elastic(tmp_path, "doctor", "--nodes", "many")
    assert misuse.returncode == 2
