"""A job's id is read from files that another user may have prepared, and becomes an argument of Slurm's commands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_elastic.base.files import write_json
from hpc_elastic.cli.main import main
from hpc_elastic.errors import UsageError
from hpc_elastic.launch.run_directory import job_now
from hpc_elastic.report.collect import collect_attempt
from hpc_elastic.run import index
from hpc_elastic.run.paths import RunPaths, StoredResult, UnreadableAttemptError, is_job_id, load_attempt, load_result
from hpc_elastic.slurm.commands import JobId
from hpc_elastic.slurm.job_state import parse_dependents, parse_show_job, parse_squeue
from hpc_elastic.submission import local_process
from hpc_elastic.workers import tree
from tests.unit.launch.test_launch_run_status import RUN_ID, Run

GOOD = ["7", "4294967295", "70_3", "70_4294967294", "70+1"]
BAD: list[Any] = [
    "--user=root", "-u", "", " 7", "7 ", "7\n", "7,8", "7 8", "0", "007", "-7", "+7", "7_", "_7", "7+", "7_-1",
    "7_[1-3]", "7;scancel", "7_1+1", "seven", "\u0667", "7\u0660", "7_\u0661", "1" * 5000, "7_" + "1" * 5000, 7, 7.0,
    True, ["7"], {},
]  # fmt: skip


def change(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture(autouse=True)
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[list[str]]]:
    """What Slurm's commands were given."""
    folder, log = tmp_path / "bin", tmp_path / "commands"
    folder.mkdir()
    for name in ("scancel", "scontrol", "squeue"):
        program = (
            f"#!{sys.executable}\nimport json, sys\nopen({str(log)!r}, 'a').write(json.dumps(sys.argv) + chr(10))\n"
        )
        (folder / name).write_text(program)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return lambda: [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


@pytest.mark.parametrize("value", GOOD)
def test_ids(value: str) -> None:
    assert is_job_id(value)
    assert str(JobId(value)) == value


@pytest.mark.parametrize("value", BAD, ids=lambda value: repr(value)[:20])
def test_what_is_no_id_is_taken_from_no_file(tmp_path: Path, value: object) -> None:
    assert not is_job_id(value)
    run = Run(tmp_path).attempt(0).ended("failed", 75)
    assert load_attempt(run.there.attempt_json).job_id == run.status().job_id == str(job_now(run.paths)) == "42"
    change(run.there.result_json, next_job=value)
    stored = load_result(run.there.result_json)
    assert stored is None or stored.next_job == ""
    assert run.status().job_id == str(job_now(run.paths)) == "42"
    change(run.there.result_json, next_job="")
    change(run.there.attempt_json, job_id=value)
    with pytest.raises(UnreadableAttemptError, match=r"job_id .* is not a job id|at `\$\.job_id`"):
        load_attempt(run.there.attempt_json)
    assert run.status().job_id is None
    assert "job_id" in run.status().problem
    assert job_now(run.paths) is None
    assert collect_attempt(run.there).job_id == ""
    run.there.events.mkdir()
    event = {"event": "attempt_started", "t": 1, "job_id": value, "nodes": ["n1"]}
    (run.there.events / "supervisor--1-x.jsonl").write_text(json.dumps(event) + "\n")
    assert collect_attempt(run.there).job_id == ""


@pytest.mark.parametrize("value", BAD, ids=lambda value: repr(value)[:20])
def test_the_index_has_no_other_ids(tmp_path: Path, value: object) -> None:
    assert index.record(cluster="c", job_id="7", submitted_ns=1, run_dir=tmp_path / "r") is None
    assert len(index.jobs_of(str(tmp_path / "r"))) == 1
    for path in (tmp_path / "state").rglob("*.json"):
        change(path, job_id=value)
    assert index.jobs_of(str(tmp_path / "r")) == []


@pytest.mark.parametrize("name", ["cancel", "requeue", "status"])
def test_a_prepared_run_directory_gives_slurms_commands_no_option(
    tmp_path: Path, name: str, commands: Callable[[], list[list[str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path).attempt(0)
    change(run.there.attempt_json, job_id="--user=root")
    assert main([name, str(run.paths.root)]) == (0 if name == "status" else 2)
    assert commands() == []
    assert "job_id '--user=root' is not a job id" in "".join(capsys.readouterr())
    change(run.there.attempt_json, job_id="42")
    StoredResult(outcome="failed", reason="", exit_code=75, action="requeue", decision="", next_job="--me").save(
        run.there.result_json
    )
    main([name, str(run.paths.root)])
    assert all("--me" not in argv for argv in commands())
    assert RUN_ID in str(run.paths.root)


@pytest.mark.parametrize("value", ["--user=root", "7 8", "7,8", "", "-7", "7\n"])
def test_what_a_command_could_misread_becomes_no_argument(value: str) -> None:
    with pytest.raises(UsageError, match="is not the id of a Slurm job"):
        JobId(value)


def test_what_slurm_says_of_something_else_is_left_out() -> None:
    row = "|RUNNING|None|1:00|5:00|1|n1|n1|2026-11-21T02:16:42|2026-11-21T02:21:42|1|2026-11-21T02:16:42"
    ids = ["7", "70_3", "70_[3-5,7%2]", "70_[0-7,...]", "70+1", "--user=root", "7 8", "70_[--x]]"]
    assert [state.job_id for state in parse_squeue("\n".join(one + row for one in ids))] == ids[:5]
    assert parse_dependents("--x|afterany:7(unfulfilled)\n8|afterany:7(unfulfilled)", "7") == ("8",)
    assert parse_show_job("JobId=--x JobName=a\n   JobState=RUNNING\n") == ()


@pytest.mark.parametrize("text", ["7_" + "1" * 5000, "1" * 5000, "x_" + "1" * 5000, "--user=root", "7_٣"])
def test_an_argument_that_is_none_is_refused_in_one_line(
    tmp_path: Path, text: str, commands: Callable[[], list[list[str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cancel", "--runs-dir", str(tmp_path), "--", text]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert commands() == []


@pytest.mark.parametrize(
    "facts",
    [
        {"pid": -1}, {"pid": 0}, {"pid": 1}, {"pid": "12"}, {"pid": None}, {"starttime": "x"},
        {"pid": True},
    ],
)  # fmt: skip
def test_a_launcher_that_is_none_gets_no_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, facts: dict[str, object]
) -> None:
    sent: list[object] = []
    monkeypatch.setattr(os, "kill", lambda *args: sent.append(args))
    paths = RunPaths(tmp_path)
    good = {"pid": os.getpid(), "starttime": 1, "host": os.uname().nodename}
    write_json(paths.launcher_json, {**good, **facts})
    assert not local_process.send(paths, signal.SIGTERM)
    assert not local_process.lives(paths)
    assert sent == []


def test_another_process_of_the_users_gets_no_signal_for_a_launcher(tmp_path: Path) -> None:
    """A prepared launcher.json may name any process: only the launcher of this very run counts."""
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    program = "import signal; signal.signal(signal.SIGTERM, signal.SIG_DFL); print(flush=True); signal.pause()"
    for argv, is_ours in (
        (["hpc_elastic.submission.local_process", "/elsewhere/another-run"], False),
        (["hpc_elastic.submission.local_process", str(paths.root)], True),
    ):
        with subprocess.Popen([sys.executable, "-c", program, *argv], stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None
                process.stdout.readline()
                proc = tree.look_at(process.pid)
                assert proc is not None
                facts = {"pid": proc.pid, "starttime": proc.starttime, "host": os.uname().nodename}
                write_json(paths.launcher_json, facts)
                assert local_process.lives(paths) is is_ours
                assert local_process.send(paths, signal.SIGTERM) is is_ours
                if is_ours:
                    assert process.wait(timeout=60) == -signal.SIGTERM
            finally:
                process.kill()
