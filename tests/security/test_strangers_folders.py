"""Folders of another user that a victim is to work in: refused in one line, with nothing left in them."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from tests.rigs.captures import DATA
from tests.rigs.two_users import User

STEP = dict(line.split("=", 1) for line in (DATA / "22.05.8/env-plain-step-n1-task0.txt").read_text().splitlines())
_EXECUTOR = """
import sys
from hpc_elastic.submission.executor import ElasticExecutor
print(ElasticExecutor(sys.argv[1], cluster="local").submit(print, 1).result())
"""
MAKERS: dict[str, tuple[list[str], dict[str, str]]] = {
    "run": (["hpc-elastic", "run", "--cluster", "local", "--runs-dir", "{runs}", "train.py"], {}),
    "submit": (["hpc-elastic", "submit", "--allow-local-runs-dir", "--runs-dir", "{runs}", "train.py"], {}),
    "run in a job": (
        ["hpc-elastic", "run", "--runs-dir", "{runs}", "train.py"],
        {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_RESTART_COUNT": "1"},
    ),
    "agent": (["hpc-elastic", "agent", "--runs-dir", "{runs}", "train.py"], STEP),
    "executor": (["{python}", "-c", _EXECUTOR, "{runs}"], {}),
}
"""What makes run directories → how it is called, and its environment."""


@pytest.mark.parametrize("mode", ["1777", "777"])
@pytest.mark.parametrize("maker", MAKERS)
def test_a_strangers_runs_folder_is_refused_by_each_maker_of_runs(
    attacker: User, victim: User, shared: Path, maker: str, mode: str
) -> None:
    runs = shared / "runs"
    attacker.run(["mkdir", "-m", mode, str(runs)], check=True)
    victim.python("open('train.py', 'w').write('print(1)')")
    programs = victim.home / "bin"
    make = 'mkdir -p "$0"; for name in "$@"; do printf "#!/bin/sh\\nexit 1\\n" > "$0/$name"; chmod 755 "$0/$name"; done'
    victim.run(["sh", "-ec", make, str(programs), "sbatch", "scontrol", "sinfo", "srun", "squeue"], check=True)
    words, env = MAKERS[maker]
    argv = [word.format(runs=runs, python=victim.interpreter) for word in words]
    path = f"{victim.environment.bin}:{programs}:{os.defpath}"
    done = victim.run(argv, env={**env, "PATH": path}, timeout=60)
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if f"belongs to uid {attacker.uid}" in line]
    assert "--runs-dir" in line
    assert list(runs.iterdir()) == []


_GOES_ON_WITH = """
import sys
from pathlib import Path
from hpc_elastic.launch.run_directory import earlier_run
from hpc_elastic.run.spec import load_run_spec
from hpc_elastic.slurm.job_environment import JobEnvironment
runs = Path(sys.argv[1])
env = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_RESTART_COUNT": "1"}
print(earlier_run(JobEnvironment.from_env(env), load_run_spec(runs / "9/run.json"), runs, env))
"""


def test_a_requeued_job_of_roots_goes_on_with_no_run_that_another_user_planted(attacker: User, shared: Path) -> None:
    """Root reads every user's files: a run with root's own command and job, in a folder with a sticky bit."""
    runs = shared / "runs"
    runs.mkdir()
    runs.chmod(0o1777)
    attacker.python("open('train.py', 'w').write('print(1)')")
    attacker.hpc_elastic("run", "--cluster", "local", "--runs-dir", runs, "--run-id", "9", "train.py")
    attacker.python(
        """
        import json, sys
        from pathlib import Path
        run = Path(sys.argv[1]) / "9"
        facts = json.loads((run / "attempt-000/attempt.json").read_text())
        (run / "attempt-000/attempt.json").write_text(json.dumps({**facts, "job_id": "7", "restart_count": 0}))
        (run / "attempt-000/result.json").unlink()
        """,
        runs,
    )
    root = dataclasses.replace(attacker, name="root", uid=0, gid=0)
    assert root.python(_GOES_ON_WITH, runs).stdout == "None\n"


def test_the_doctor_makes_no_run_in_a_strangers_runs_folder(attacker: User, victim: User, shared: Path) -> None:
    """Its runs are in a folder of their own there, which the owner of the one above could replace."""
    attacker.run(["mkdir", "-m", "1777", str(shared / "runs")], check=True)
    done = victim.hpc_elastic("doctor", "--cluster", "local", "--nodes", "1", "--runs-dir", shared / "runs")
    (line,) = [line for line in done.stdout.splitlines() if " nodes.job: " in line]
    assert line.startswith("problem ")
    assert f"belongs to uid {attacker.uid}" in line
    assert list((shared / "runs").iterdir()) == []


SWAP = """
import sys, time
from pathlib import Path
CODE = "import os; open(f'/dev/shm/{os.getuid()}', 'w')"
runs, end = Path(sys.argv[1]), time.monotonic() + 20
while time.monotonic() < end:
    for folder in runs.glob("rehearsal-*"):
        theirs = runs / f"theirs-{folder.name}"
        theirs.mkdir()
        for name in ("undisturbed", "disturbed-1"):
            (theirs / name / "hook").mkdir(parents=True)
            (theirs / name / "hook" / "sitecustomize.py").write_text(CODE)
        folder.rename(runs / f"gone-{folder.name}")
        theirs.rename(folder)
    time.sleep(0.001)
"""


@pytest.mark.parametrize("mode", ["1777", "777", "755"])
def test_a_rehearsal_in_a_strangers_runs_folder_is_refused_before_anything_is_made(
    attacker: User, victim: User, shared: Path, mode: str
) -> None:
    """Its owner puts another folder in the place of the rehearsal's, whose hook would run in the victim's workers."""
    runs = shared / "runs"
    attacker.run(["mkdir", "-m", mode, str(runs)], check=True)
    victim.python("open('train.py', 'w').write('print(1)')")
    swapper = attacker.popen([attacker.interpreter, "-c", SWAP, str(runs)])
    try:
        done = victim.hpc_elastic("rehearse", "--runs-dir", runs, "train.py")
    finally:
        swapper.kill()
        swapper.communicate()
    assert done.returncode == 2
    assert f"belongs to uid {attacker.uid}" in done.stderr
    assert "--runs-dir" in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(runs.iterdir()) == []
    assert not Path(f"/dev/shm/{victim.uid}").exists(), "the attacker's code ran"


def test_a_sticky_bit_does_not_hold_back_the_owner_of_the_folder(attacker: User, victim: User, shared: Path) -> None:
    """Why it is refused: the kernel lets the attacker move the victim's folder away, and put another in its place."""
    runs = shared / "runs"
    attacker.run(["mkdir", "-m", "1777", str(runs)], check=True)
    victim.run(["mkdir", "-m", "700", str(runs / "run")], check=True)
    attacker.run(["mv", str(runs / "run"), str(runs / "gone")], check=True)
    attacker.run(["mkdir", str(runs / "run")], check=True)


def test_a_strangers_rendezvous_folder_is_refused(attacker: User, victim: User, shared: Path) -> None:
    attacker.run(["mkdir", "-m", "1777", str(shared / "meet")], check=True)
    done = victim.python(
        """
        import sys
        from hpc_elastic.base.clock import SystemClock
        from hpc_elastic.rendezvous.handler_config import HandlerConfig
        from hpc_elastic.rendezvous.handler_config import RunFolder
        RunFolder(HandlerConfig(directory=sys.argv[1], run_id="job", min_nodes=1, max_nodes=1), SystemClock()).enter(1)
        """,
        shared / "meet",
        check=False,
    )
    assert f"UnsafePathError: the rendezvous folder {shared}/meet belongs to uid {attacker.uid}" in done.stderr
    assert list((shared / "meet").iterdir()) == []
