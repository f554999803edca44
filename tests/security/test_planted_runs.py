"""Run directories that an attacker made, with links to the victim's own files, handed to the victim's commands."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.two_users import TwoUsers, User

COMMANDS = (["status"], ["report"], ["logs"], ["logs", "--events"])


@pytest.fixture(scope="module")
def attackers_run(users: TwoUsers) -> Iterator[Path]:
    """One that has ended, open to all. Its worker has printed a line."""
    attacker = users.attacker
    attacker.run(["mkdir", "-m", "755", "runs"], check=True)
    attacker.home.chmod(0o755)
    attacker.python("open('train.py', 'w').write('print(\"PLANTED\")')")
    attacker.hpc_elastic("run", "--cluster", "local", "--runs-dir", "runs", "--run-id", "r", "train.py", check=True)
    attacker.run(["chmod", "-R", "a+rX", "runs"], check=True)
    yield attacker.home / "runs" / "r"
    attacker.home.chmod(0o700)


@pytest.fixture
def planted(attackers_run: Path, attacker: User, shared: Path) -> Path:
    """A copy of it for one test, which the attacker changes."""
    attacker.run(["cp", "-r", str(attackers_run), str(shared / "planted")], check=True)
    return shared / "planted"


def look(victim: User, run_dir: Path) -> str:
    """What the victim's commands print: none waits, none has a traceback."""
    said = []
    for command in COMMANDS:
        done = victim.hpc_elastic(*command, run_dir, timeout=20)
        assert done.returncode in (0, 1, 2), (command, done.stderr)
        assert "Traceback" not in done.stdout + done.stderr, (command, done.stderr)
        said.append(done.stdout + done.stderr)
    return "\n".join(said)


def test_of_a_strangers_run_text_is_shown_and_its_owner_is_named(attacker: User, victim: User, planted: Path) -> None:
    said = look(victim, planted)
    assert "PLANTED" in said
    assert f"run.json belongs to uid {attacker.uid}, not to you" in said


@pytest.mark.parametrize(
    "name",
    [
        "run.json",
        "attempt-000",
        "attempt-000/attempt.json",
        "attempt-000/result.json",
        "attempt-000/report.txt",
        "attempt-000/events",
        "attempt-000/round-000/rank-00000/stdout.log",
        "attempt-000/store",
    ],
)
def test_nothing_waits_for_a_planted_fifo(attacker: User, victim: User, planted: Path, name: str) -> None:
    attacker.run(["sh", "-ec", 'rm -rf "$0"; mkfifo -m 666 "$0"', str(planted / name)], check=True)
    look(victim, planted)


def test_links_to_the_victims_own_files_show_nothing_that_is_no_run(
    attacker: User, victim: User, planted: Path
) -> None:
    """As a link is followed with the victim's rights: what lies behind must not be printed as if it were a run's."""
    victim.python("open('precious', 'w').write('PRECIOUS')")
    for name in ("run.json", "attempt-000/report.txt", "attempt-000/round-000/rank-00000/stdout.log", "job.log"):
        attacker.run(["ln", "-sf", str(victim.home / "precious"), str(planted / name)], check=True)
    assert "PRECIOUS" not in look(victim, planted)


def test_a_copy_can_be_looked_at_and_runs_nothing(attacker: User, victim: User, planted: Path, shared: Path) -> None:
    """Reports are text: to look at a copy needs no trust. What is planted in it runs nothing."""
    attacker.python(
        """
        import json, os, sys
        from pathlib import Path
        run, marker = map(Path, sys.argv[1:])
        spec = json.loads((run / "run.json").read_text())
        spec["entrypoint"] = {"kind": "command", "target": f"touch {marker}", "args": [f"$(touch {marker})"]}
        spec["name"] = f"$(touch {marker});`touch {marker}`"
        (run / "run.json").write_text(json.dumps(spec))
        for name in ("job.sbatch", "sitecustomize.py", "conftest.py"):
            (run / name).write_text(f"import os; os.system('touch {marker}')")
        """,
        planted,
        shared / "attacked",
    )
    victim.run(["cp", "-r", str(planted), str(victim.home / "copy")], check=True)
    for cwd in (victim.home, victim.home / "copy"):
        for command in COMMANDS:
            done = victim.hpc_elastic(*command, victim.home / "copy", cwd=cwd)
            assert done.returncode in (0, 1), done.stderr
    assert "PLANTED" in victim.hpc_elastic("logs", victim.home / "copy").stdout
    assert not (shared / "attacked").exists()


@pytest.mark.parametrize("command", ["cancel", "requeue"])
def test_a_planted_run_makes_no_call_of_slurm(
    attacker: User, victim: User, planted: Path, shared: Path, command: str
) -> None:
    attacker.python(
        """
        import json, os, sys
        from pathlib import Path
        root = Path(sys.argv[1])
        for path in (*root.glob("*.json"), *root.glob("attempt-000/*.json")):
            value = json.loads(path.read_text())
            path.write_text(json.dumps({**value, "job_id": "4711", "cluster": "slurm"}))
        """,
        planted,
    )
    programs = shared / "bin"
    programs.mkdir()
    for name in ("scancel", "scontrol", "squeue", "sacct", "sbatch"):
        (programs / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {shared}/called\nexit 1\n')
        (programs / name).chmod(0o755)
    path = f"{programs}:{victim.environment.bin}:{os.defpath}"
    done = victim.hpc_elastic(command, planted, env={"PATH": path})
    assert done.returncode == 2, done.stderr
    assert not (shared / "called").exists()
