"""Where a run stands, from a run directory as its parts write it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from hpc_elastic.base import codec
from hpc_elastic.base.files import make_private_dir, write_private
from hpc_elastic.cli.status import elapsed_text, status_json, status_line, status_lines
from hpc_elastic.launch.run_status import OutputStatus, RunState, RunStatus, StepStatus, read_status, state_of
from hpc_elastic.rendezvous.membership import RoundLog
from hpc_elastic.rendezvous.state import Member, RoundRecord, RunNotice, Status
from hpc_elastic.run.paths import Outcome, RunPaths
from hpc_elastic.run.progress import (
    NodeHeartbeats,
    Progress,
    ProgressSource,
    RankHeartbeat,
    RunPace,
    SlowRank,
    SlowRanks,
)
from hpc_elastic.run.spec import load_run_spec
from hpc_elastic.slurm.job_state import JobState
from hpc_elastic.store.file_store import FileStore
from tests.rigs.fake_clock import FakeClock
from tests.rigs.specs import make_attempt, make_spec, store_result

RUN_ID = "20261121-000000-train-abcd"
MEMBERS = (Member("a", 0, 2), Member("b", 2, 2))


def record(status: Status, **changes: Any) -> RoundRecord:
    base: dict[str, Any] = {"epoch": "e", "term": 1, "leader": "a", "round": 1, "members": MEMBERS, "lost": (1,)}
    return RoundRecord(number=1, status=status, **{**base, **changes})


class Run:
    def __init__(self, folder: Path) -> None:
        self.paths = RunPaths(folder / RUN_ID)
        self.clock = FakeClock()
        make_private_dir(self.paths.root)
        spec = make_spec(run_id=RUN_ID, name="train", created_ns=7, cluster="slurm", min_nodes=2, max_nodes=3)
        spec.save(self.paths.run_json)

    def attempt(self, number: int) -> Run:
        self.there = self.paths.attempt(number)
        make_private_dir(self.there.root)
        make_attempt(number=number, nodes=("n1", "n2", "n3"), started_ns=1, job_id="42").save(self.there.attempt_json)
        return self

    def log(self, newest: RoundRecord) -> Run:
        assert RoundLog(FileStore(self.there.store, clock=self.clock), RUN_ID).append(newest)
        return self

    def steps(
        self,
        node: int,
        round_index: int,
        *steps: int | None,
        source: ProgressSource = ProgressSource.HEARTBEAT,
        progress: Progress | None = None,
    ) -> Run:
        path = self.there.heartbeats(node)
        make_private_dir(path.parent)
        field = "step" if source is ProgressSource.HEARTBEAT else "counted_steps"
        ranks = tuple(
            RankHeartbeat(rank=2 * (node // 2) + n, source=source, **{field: step}) for n, step in enumerate(steps)
        )
        written = self.clock.time_ns() - 3_000_000_000
        codec.save(
            path, NodeHeartbeats(node=node, round=round_index, written_ns=written, progress=progress, ranks=ranks)
        )
        return self

    def ended(self, outcome: str, code: int) -> Run:
        store_result(self.there, code, outcome=outcome, reason="why")
        return self

    def status(self) -> RunStatus:
        return read_status(self.paths, clock=self.clock)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_from_the_submission_to_the_first_round(run: Run) -> None:
    status = run.status()
    assert (status.state, status.attempt, status.name, status.cluster) == (RunState.SUBMITTED, None, "train", "slurm")
    assert status_lines(status, None, seconds_left=None)[0] == f"run {RUN_ID}: submitted"
    status = run.attempt(0).status()
    assert (status.state, status.job_id, status.nodes) == (RunState.MEETING, "42", ("n1", "n2", "n3"))
    assert not run.there.store.exists(), "who looks makes nothing"
    run.log(record(Status.FINAL)).steps(0, 0, 400, 400)
    assert run.status().steps is None, "heartbeats of another round are none of this one"


def test_a_step_that_slurm_does_not_make(run: Run) -> None:
    waits = "srun: Job 42 step creation temporarily disabled, retrying (Requested nodes are busy)"
    write_private(run.attempt(0).paths.job_log, f"[hpc-elastic] run directory: /r\n{waits}\n")
    status = read_status(run.paths, clock=run.clock, looks_at_output=True)
    assert f"  because  : {waits}" in status_lines(status, None, seconds_left=None)
    write_private(run.paths.job_log, f"{waits}\nsrun: Step created for job 42\n")
    assert read_status(run.paths, clock=run.clock, looks_at_output=True).opened_because == ""


def test_training(run: Run) -> None:
    run.attempt(2).log(record(Status.FINAL, reason="rank 3 ended with SIGKILL on n2", restarts_used=1, waiting=1))
    run.steps(0, 1, 40, 41).steps(2, 1, 40, None)
    status = run.status()
    assert status.state is RunState.TRAINING
    assert (status.round, status.members, status.workers, status.lost) == (1, ("n1", "n3"), 4, ("n2",))
    assert (status.restarts_used, status.requeues_used, status.waiting) == (1, 2, 1)
    assert status.steps == StepStatus(
        least=40, most=41, behind=(0, 2), ranks=3, told_seconds=3.0, source=ProgressSource.HEARTBEAT
    )
    assert status.started_ns == 1
    job = JobState(job_id="42", state="RUNNING", reason="")
    text = "\n".join(status_lines(status, job, seconds_left=13280))
    assert f"run {RUN_ID}: training, attempt 2, job 42" in text
    assert "slurm    : RUNNING, 3:41:20 left" in text
    assert "round    : 1: 2 nodes, 4 workers: n[1,3]" in text
    assert "because  : rank 3 ended with SIGKILL on n2" in text
    assert "steps    : 40 to 41 (behind: rank 0,2); last heartbeat 3 s ago (3 workers)" in text
    assert "used     : 1 of 3 restarts in this attempt, 2 of 3 requeues" in text


def test_pace_end_and_checkpoint_by_the_heartbeats(run: Run) -> None:
    run.attempt(0).log(record(Status.FINAL))
    for node, pace in ((0, 2.5), (2, 2.0)):
        path = run.there.heartbeats(node)
        make_private_dir(path.parent)
        ranks = tuple(
            RankHeartbeat(rank=node + n, step=1100, age=1.0 + n, count=9, saved_step=1000 + n, saved_age=60.0 + node)
            for n in range(2)
        )
        written = run.clock.time_ns() - 3_000_000_000
        found = NodeHeartbeats(
            node=node, round=1, written_ns=written, ranks=ranks, steps_per_second=pace, total=10_100, loss=pace / 8
        )
        codec.save(path, found)
    status = run.status()
    assert status.steps is not None
    assert (status.steps.steps_per_second, status.steps.total, status.steps.seconds_to_end) == (2.0, 10_100, 4500.0)
    text = "\n".join(status_lines(status, None, seconds_left=None, now_ns=61_000_000_001))
    assert "time     : 0:01:01 elapsed" in text
    assert (
        "steps    : 1100 of 10100, 2 steps/s, 1:15:00 to the end, loss 0.3125; last heartbeat 4 s ago (4 workers)"
        in text
    )
    assert "saved    : last checkpoint: step 1001, 63 s ago" in text
    assert f"rank logs: {run.there.root}/round-001/rank-*/{{stdout,stderr}}.log" in text
    assert json.loads(json.dumps(status_json(status, None, seconds_left=None)))["steps"]["checkpoint_step"] == 1001


def test_without_heartbeats_the_logs_show_whether_it_moves(run: Run) -> None:
    run.attempt(0).log(record(Status.FINAL))
    assert run.status().output is None
    status = read_status(run.paths, clock=run.clock, looks_at_output=True)
    assert "progress unknown; the size of the logs: none of 4 ranks has printed anything yet" in "\n".join(
        status_lines(status, None, seconds_left=None)
    )
    now = run.clock.time_ns()
    for rank, text in enumerate(("", "epoch 1\n", "", "")):
        paths = run.there.rank(1, rank)
        paths.root.mkdir(parents=True)
        paths.stdout.write_text(text)
        paths.stderr.touch()
        os.utime(paths.stdout, ns=(now - 7_000_000_000, now - 7_000_000_000))
    status = read_status(run.paths, clock=run.clock, looks_at_output=True)
    assert status.output == OutputStatus(bytes=8, silent_seconds=7.0, newest_rank=1, silent_ranks=3, ranks=4)
    (line,) = [line for line in status_lines(status, None, seconds_left=None) if "output" in line]
    assert line == (
        "  output   : progress unknown; the size of the logs: 8 bytes, the last 7 s ago (rank 1); "
        "3 of 4 ranks have printed nothing"
    )
    assert status.progress is ProgressSource.UNKNOWN
    for node, seconds in ((0, 0.0), (2, 40.0)):
        run.steps(node, 1, None, progress=Progress(resting=seconds))
    status = read_status(run.paths, clock=run.clock, looks_at_output=True)
    assert (status.progress, status.resting) == (ProgressSource.KERNEL, 0.0)
    assert "by the kernel's counts the processes work; the size" in "\n".join(
        status_lines(status, None, seconds_left=None)
    )
    run.steps(0, 1, None, progress=Progress(resting=50.0))
    status = read_status(run.paths, clock=run.clock, looks_at_output=True)
    assert "by the kernel's counts the processes have rested for 0:00:43; the" in "\n".join(
        status_lines(status, None, seconds_left=None)
    )
    run.steps(0, 1, 4, 4)
    assert read_status(run.paths, clock=run.clock, looks_at_output=True).output is None


def test_collectives_stand_in_for_steps(run: Run) -> None:
    run.attempt(0).log(record(Status.FINAL)).steps(0, 1, 40, 38, source=ProgressSource.COLLECTIVES)
    status = run.status()
    assert (status.state, status.progress) == (RunState.TRAINING, "collectives")
    text = "\n".join(status_lines(status, None, seconds_left=None))
    assert "progress : 38 to 40 collectives of this round (behind: rank 1); last one 3 s ago (2 workers)" in text
    assert status_line(status).endswith("  38 collectives")


def test_slow_ranks_and_a_slow_run_of_this_round(run: Run) -> None:
    one = SlowRank(rank=1, node=1, host="n2", seconds=0.03, call="gloo:all_reduce [[9]]", calls=40, share=0.25)
    run.attempt(0).log(record(Status.FINAL))
    for index, is_shown in ((0, False), (1, True)):
        found = SlowRanks(round=index, written_ns=1, ranks=(one,), pace=RunPace(step=1.25, best=1.0))
        run.there.slow_ranks.mkdir(exist_ok=True)
        codec.save(run.there.slow_ranks / "now.json", found)
        status = run.status()
        assert (status.slow_ranks, status.slow_pace) == (((one,), found.pace) if is_shown else ((), None))
        shown = [line for line in status_lines(status, None, seconds_left=None) if line.startswith("  slow ")]
        assert shown == [f"  slow     : {what}" for what in (one, found.pace) if is_shown]


def test_the_job_logs_path(run: Run) -> None:
    assert run.attempt(0).status().job_log == ""
    run.paths.job_log.touch()
    assert run.status().job_log == str(run.paths.job_log)
    spec = load_run_spec(run.paths.run_json)
    replace(spec, sbatch_args=("--nodes=2", "--output=/logs/%x-%j.out")).save(run.paths.run_json)
    assert run.status().job_log == "/logs/%x-42.out"


@pytest.mark.parametrize(
    ("newest", "code", "state"),
    [
        (None, None, RunState.MEETING),
        (record(Status.JOINABLE), None, RunState.MEETING),
        (record(Status.FROZEN), None, RunState.MEETING),
        (record(Status.FINAL), None, RunState.TRAINING),
        (record(Status.FINAL, notice=RunNotice("SIGUSR2 on n1", 85.0)), None, RunState.SAVING),
        (record(Status.CLOSED, outcome=Outcome.FAILED), None, RunState.ENDING),
        (record(Status.CLOSED, outcome=Outcome.FAILED), 1, RunState.ENDED),
        (record(Status.CLOSED, outcome=Outcome.PREEMPTED), 75, RunState.REQUEUED),
    ],
)
def test_the_state_in_one_word(newest: RoundRecord | None, code: int | None, state: RunState) -> None:
    assert state_of(newest, code) is state


def test_the_end(run: Run) -> None:
    run.attempt(0).log(record(Status.CLOSED, outcome=Outcome.FAILED, reason="boom")).ended("failed", 1)
    status = run.status()
    assert (status.state, status.outcome, status.exit_code, status.reason) == (RunState.ENDED, "failed", 1, "why")
    assert "  ended    : failed (exit code 1): why" in status_lines(status, None, seconds_left=None)


def test_what_is_damaged_is_said_and_the_rest_is_shown(run: Run) -> None:
    run.attempt(0).log(record(Status.FINAL))
    run.there.attempt_json.write_text("{")
    status = run.status()
    assert status.state is RunState.UP
    assert status.members == ("node 0", "node 2")
    assert "attempt.json" in status.problem
    run.paths.run_json.unlink()
    assert "run.json" in run.status().problem
    run.ended("failed", 1)
    assert not any("in total" in line for line in status_lines(run.status(), None, seconds_left=None, now_ns=1))


def test_nothing_from_a_file_steers_the_terminal(run: Run) -> None:
    run.attempt(0).log(record(Status.FINAL, reason="rank 1: \x1b[2J\nboom"))
    lines = status_lines(run.status(), None, seconds_left=None)
    assert not [line for line in lines if not line.isprintable()]


def test_json_has_the_same(run: Run) -> None:
    run.attempt(0).log(record(Status.FINAL)).steps(0, 1, 5)
    job = JobState(job_id="42", state="PENDING", reason="Resources")
    value = status_json(run.status(), job, seconds_left=None)
    assert (value["version"], value["state"], value["steps"]["least"]) == (1, "training", 5)
    assert value["slurm"] == {"state": "PENDING", "reason": "Resources", "nodes": [], "seconds_left": None}


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00:00"), (59.9, "0:00:59"), (13280, "3:41:20"), (183600, "2-03:00:00")]
)
def test_durations(seconds: float, text: str) -> None:
    assert elapsed_text(seconds) == text
