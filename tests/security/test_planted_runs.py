"""Run directories that an attacker made, with links to the victim's own files, handed to the victim's commands."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.two_users import TwoUsers, User

ENDED = json.dumps({"version": 1, "outcome": "failed", "reason": "x", "exit_code": 1, "action": "end", "decision": "x"})
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
        "attempt-000/output.log",
        "attempt-000/records.log",
    ],
)
def test_nothing_waits_for_a_planted_fifo(attacker: User, victim: User, planted: Path, name: str) -> None:
    attacker.run(["sh", "-ec", 'mkdir -p "${0%/*}"; rm -rf "$0"; mkfifo -m 666 "$0"', str(planted / name)], check=True)
    look(victim, planted)


def test_links_to_the_victims_own_files_show_nothing_that_is_no_run(
    attacker: User, victim: User, planted: Path
) -> None:
    """As a link is followed with the victim's rights: what lies behind must not be printed as if it were a run's."""
    victim.python("open('precious', 'w').write('PRECIOUS')")
    place = "attempt-000/round-000/rank-00000"
    attacker.run(["mkdir", "-p", str(planted / place)], check=True)
    for name in ("run.json", "attempt-000/report.txt", f"{place}/stdout.log", "attempt-000/output.log", "job.log"):
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


class FakeSlurm:
    """Programs of Slurm's names on a PATH: what they were called with, and a job 4711 of `user`."""

    def __init__(self, folder: Path, user: User | None) -> None:
        self._folder, self.path = folder, folder / "bin"
        self.path.mkdir()
        facts = (
            f"JobId=4711 JobName=x\n   UserId={user.name}({user.uid})\n   JobState=RUNNING Reason=None" if user else ""
        )
        shows = f"case \"$1 $2\" in 'show job') echo '{facts}'; exit 0 ;; esac" if user else ""
        says = {"scancel": "exit 0", "scontrol": shows, "sbatch": "echo 4712", "squeue": "", "sacct": ""}
        for name, text in says.items():
            called = f'#!/bin/sh\necho {name} "$@" >> {folder}/called\n{text}\n'
            (self.path / name).write_text(f"{called}echo Invalid job id specified >&2; exit 1\n")
            (self.path / name).chmod(0o755)
        (folder / "called").touch()
        (folder / "called").chmod(0o666)

    def env(self, user: User) -> dict[str, str]:
        return {"PATH": f"{self.path}:{user.environment.bin}:{os.defpath}"}

    @property
    def changes(self) -> list[str]:
        """The calls that change a job, without the cluster's questions."""
        calls = (self._folder / "called").read_text().splitlines()
        return [call for call in calls if not call.startswith(("scontrol show", "squeue", "sacct"))]


def name_job(owner: User, run_dir: Path) -> None:
    """Have `owner` write the number 4711 into a run's files; it has not ended."""
    owner.python(
        """
        import json, os, sys
        from pathlib import Path
        root = Path(sys.argv[1])
        for path in (*root.glob("*.json"), *root.glob("attempt-000/*.json")):
            value = json.loads(path.read_text())
            path.write_text(json.dumps({**value, "job_id": "4711", "cluster": "slurm"}))
        for name in ("result.json", "records.log"):
            os.unlink(root / "attempt-000" / name)
        """,
        run_dir,
    )


@pytest.fixture
def root(victim: User) -> User:
    """Root, as under ``sudo -H``."""
    return dataclasses.replace(victim, name="root", uid=0, gid=0, home=Path("/nonexistent"))


@pytest.fixture(scope="module")
def victims_run(users: TwoUsers) -> Path:
    """One of the victim's own, which has job 4711."""
    victim = users.victim
    victim.python("open('train.py', 'w').write('print(1)')")
    victim.hpc_elastic("run", "--cluster", "local", "--runs-dir", "own", "--run-id", "r", "train.py", check=True)
    name_job(victim, victim.home / "own/r")
    return victim.home / "own" / "r"


@pytest.mark.parametrize("command", ["cancel", "requeue"])
def test_a_planted_run_makes_no_call_of_slurm(
    attacker: User, victim: User, planted: Path, shared: Path, command: str
) -> None:
    name_job(attacker, planted)
    slurm = FakeSlurm(shared, attacker)
    done = victim.hpc_elastic(command, planted, env=slurm.env(victim))
    assert done.returncode == 2, done.stderr
    assert (shared / "called").read_text() == ""


@pytest.mark.parametrize("command", ["cancel", "requeue"])
@pytest.mark.parametrize("owner", ["victim", None])
def test_root_does_nothing_to_a_job_that_is_not_its_runs_owners(
    attacker: User, victim: User, root: User, planted: Path, shared: Path, command: str, owner: str | None
) -> None:
    name_job(attacker, planted)
    slurm = FakeSlurm(shared, victim if owner else None)
    done = root.hpc_elastic(command, planted, cwd=Path("/"), env=slurm.env(root))
    assert done.returncode == 2, done.stderr
    assert f"was written by {attacker.name}, and the job that it names, 4711, " in done.stderr
    assert slurm.changes == []


@pytest.mark.parametrize("command", ["cancel", "requeue"])
def test_root_acts_on_a_users_job_by_that_users_files(
    attacker: User, root: User, planted: Path, shared: Path, command: str
) -> None:
    planted.chmod(0o700)
    name_job(attacker, planted)
    slurm = FakeSlurm(shared, attacker)
    root.hpc_elastic(command, planted, cwd=Path("/"), env=slurm.env(root))
    (only,) = slurm.changes
    assert only.startswith("scancel")
    assert only.endswith("4711")


@pytest.mark.parametrize("link", ["latest", "attempt-000", "."])
def test_a_planted_link_leads_to_no_run_of_the_victims(
    attacker: User, victim: User, root: User, planted: Path, victims_run: Path, shared: Path, link: str
) -> None:
    """Its files are the victim's, and so is its job: but which run it is, the attacker has chosen."""
    target = victims_run / "attempt-000" if link == "attempt-000" else victims_run
    given = shared / "link" if link == "." else planted / link
    attacker.run(["sh", "-ec", 'rm -rf "$0"; ln -s "$1" "$0"', str(given), str(target)], check=True)
    slurm = FakeSlurm(shared, victim)
    result = victims_run / "attempt-000/result.json"
    for command in (["cancel"], ["requeue"], ["clean", "--yes"]):
        if command[0] == "clean":
            victim.python("import sys; open(sys.argv[1], 'w').write(sys.argv[2])", result, ENDED)
        for user in (victim, root):
            done = user.hpc_elastic(
                *command, planted if link == "attempt-000" else given, cwd=Path("/"), env=slurm.env(user)
            )
            assert done.returncode != 0, done.stdout
    result.unlink()
    assert slurm.changes == []
    assert (victims_run / "run.json").exists()


def test_root_believes_no_folder_that_others_can_write_to(
    attacker: User, victim: User, root: User, planted: Path, victims_run: Path, shared: Path
) -> None:
    """There, an attacker names another job of the run's owner."""
    name_job(attacker, planted)
    victim.home.chmod(0o755)
    victims_run.parent.chmod(0o755)
    victims_run.chmod(0o777)
    try:
        attacker.run(["cp", "-r", str(planted / "attempt-000"), str(victims_run / "attempt-001")], check=True)
        slurm = FakeSlurm(shared, victim)
        done = root.hpc_elastic("cancel", victims_run, cwd=Path("/"), env=slurm.env(root))
        assert "can be written by other users" in done.stderr
        assert slurm.changes == []
    finally:
        shutil.rmtree(victims_run / "attempt-001")
        victim.home.chmod(0o700)
        victims_run.chmod(0o700)


@pytest.mark.parametrize("who", ["victim", "root"])
def test_a_page_is_written_to_no_folder_that_another_user_chose(
    attacker: User, victim: User, root: User, planted: Path, who: str
) -> None:
    folder = victim.home / f"pages-{who}"
    victim.run(["sh", "-ec", 'mkdir "$0"; echo OWN > "$0/report.html"', str(folder)], check=True)
    attacker.run(["sh", "-ec", 'rm -r "$0"; ln -s "$1" "$0"', str(planted / "attempt-000"), str(folder)], check=True)
    user = victim if who == "victim" else root
    done = user.hpc_elastic("report", "--format", "html", planted, cwd=Path("/"))
    assert (done.returncode, (folder / "report.html").read_text()) == (2, "OWN\n")
    assert "--output FILE" in done.stderr


def test_root_submits_no_script_that_a_user_chose(attacker: User, root: User, planted: Path, shared: Path) -> None:
    """The job can't be requeued, and the run's script is a link to one of root's own."""
    planted.chmod(0o700)
    name_job(attacker, planted)
    own = shared / "roots.sh"
    own.write_text("#!/bin/sh\n")
    attacker.run(["ln", "-sf", str(own), str(planted / "job.sbatch")], check=True)
    slurm = FakeSlurm(shared, attacker)
    (slurm.path / "squeue").write_text("#!/bin/sh\nexit 1\n")
    attacker.python("import sys; open(sys.argv[1], 'w').write(sys.argv[2])", planted / "attempt-000/result.json", ENDED)
    done = root.hpc_elastic("requeue", planted, cwd=Path("/"), env=slurm.env(root))
    assert done.returncode != 0
    assert not [call for call in slurm.changes if call.startswith("sbatch")]
