"""Workers that fail under the local launcher: restarted, given up, requeued, and told of."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from hpc_elastic.base.clock import SystemClock
from hpc_elastic.launch.run_status import read_status
from hpc_elastic.report.collect import collect_run
from hpc_elastic.run.paths import ExitCode
from tests.rigs.local_run import LocalRun
from tests.rigs.processes import Process

# Every rank tells that it is here and waits for the others, so that a failure never meets a rank that still starts.
_MEET = 'tell("here", restarts=ROUND, world=WORLD); others_in_round()\n'
_UNTIL_TOLD = _MEET + 'wait_for("end")\n'


def sleepers(run: LocalRun) -> list[Process]:
    return [process for process in run.processes() if process.argv[:1] == ("sleep",)]


def test_killed_worker_three_times_in_a_row(tmp_path: Path) -> None:
    ranks = (0, 1, 0)
    with LocalRun(tmp_path, _UNTIL_TOLD, options=["--max-same-failures", "0"]) as run:
        for round_index, rank in enumerate(ranks):
            run.wait_moments("here", count=2, round_index=round_index)
            run.kill_worker(rank, round_index=round_index)
        run.wait_moments("here", count=2, round_index=3)
        run.finish_well()
        assert [worker["restarts"] for worker in run.moments("here")] == [0, 0, 1, 1, 2, 2, 3, 3]
        finals = run.events("round_final")
        assert {(event["round"], event["restarts_used"]) for event in finals} == {(0, 0), (1, 1), (2, 2), (3, 3)}
        failed = run.events("worker_failed")
        assert [(event["round"], event["rank"], event["exitcode"]) for event in failed] == [
            (index, rank, -signal.SIGKILL) for index, rank in enumerate(ranks)
        ]
        # The log of records, which `status` reads, and the events, of which the report is made, say the same.
        status, (attempt,) = read_status(run.paths, clock=SystemClock()), collect_run(run.paths.root).attempts
        last = attempt.rounds[-1]
        assert (status.round, status.outcome, status.reason) == (last.index, attempt.outcome, attempt.reason)
        assert status.restarts_used == attempt.rounds[-2].decision.restarts_used == 3  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_a_kill_right_after_each_start_is_given_up_and_no_node_is_suspect(tmp_path: Path, name: str) -> None:
    script = f"import os, signal\nos.kill(os.getpid(), signal.{name})"
    with LocalRun(tmp_path, script, nodes=2, options=["--max-restarts", "6", "--max-requeues", "3"]) as run:
        assert run.finish() == ExitCode.NOT_RETRYABLE
        assert len({event["round"] for event in run.events("worker_failed")}) == 2
        assert "each start ends the same way: the same failure 2 times in a row" in run.log()
        report = run.report()
        assert report["bad_nodes"] == []
        assert len(report["attempts"]) == 1


def test_requeue_resumes_in_the_same_run_directory(tmp_path: Path) -> None:
    script = """
    tell("here")
    others_in_round()
    checkpoint = sys.argv[1]
    start = int(open(checkpoint).read()) if os.path.exists(checkpoint) else 0
    for step in range(start, 6):
        if ATTEMPT == 0 and step == 3:
            if RANK == 0:
                raise RuntimeError("the third step fails")
            wait_for("never")
        if RANK == 0:
            with open(checkpoint + ".new", "w") as file:
                file.write(str(step + 1))
            os.replace(checkpoint + ".new", checkpoint)
    tell("trained", start=start)
    """
    checkpoint = tmp_path / "checkpoint"
    options = ["--max-restarts", "0", "--max-requeues", "1"]
    with LocalRun(tmp_path, script, options=options, arguments=[str(checkpoint)]) as run:
        assert run.finish() == ExitCode.OK
        assert checkpoint.read_text() == "6"
        trained = run.moments("trained")
        assert {(value["attempt"], value["round"], value["rank"]) for value in trained} == {(1, 0, 0), (1, 0, 1)}
        assert {value["start"] for value in trained if value["rank"] == 0} == {3}
        assert not run.paths.latest.is_symlink(), "the run is over"
        assert "RuntimeError: the third step fails" in run.rank(0, attempt=0).stderr.read_text()
        (decision,) = run.events("requeue_decision", attempt=0)
        assert (decision["action"], decision["reason"].startswith("requeue 1 of 1")) == ("requeue", True)
        report = run.report(1)
        assert [(part["number"], part["outcome"]) for part in report["attempts"]] == [(0, "failed"), (1, "succeeded")]
        text = run.attempt(1).report_text.read_text()
        assert "attempt 0" in text
        assert "attempt 1" in text
        assert run.attempt(0).report_json.exists()


def test_a_rank_that_ended_with_0_is_named_where_the_others_only_lost_it(tmp_path: Path) -> None:
    script = """
    class DistNetworkError(RuntimeError):  # as torch.distributed has it
        pass

    tell("here")
    if RANK == 1:
        wait_for("end")
        sys.exit(0)
    wait_for("fail")
    if RANK == 2:
        raise DistNetworkError("Connection closed by peer [10.0.0.1]:4711")
    wait_for("never")
    """
    with LocalRun(tmp_path, script, nproc=2, options=("--max-restarts", "0")) as run:
        run.wait_moments("here", count=4)
        pid = run.worker(1, round_index=0)
        run.say("end")
        run.until(lambda: not run.is_alive(pid), "end of rank 1")
        run.say("fail")
        assert run.finish() != ExitCode.OK
        (own,) = [event["ends"] for event in run.events("workers_stopped") if event["node"] == 0]
        assert [(end["rank"], end["exitcode"], end["stopped"]) for end in own] == [(1, 0, False)]
        verdict = run.report()["verdict"]
        assert (verdict["cause"], verdict["confidence"]) == ("unknown", "none")
        suspect = verdict["suspects"][0]
        assert (suspect["rank"], suspect["host"]) == (1, "node0")
        assert suspect["why"].startswith("it ended with 0 ")
        assert suspect["why"].endswith(" s before")


def test_what_was_printed_first_is_the_cause_though_its_worker_lives_on(tmp_path: Path) -> None:
    """Rank 0 is about to end: an exit handler keeps it, and rank 3 fails meanwhile. Its agent ends it then."""
    script = """
    import atexit, signal
    tell("here")
    if RANK == 0:
        wait_for("go")
        @atexit.register
        def linger():
            tell("lingers")
            wait_for("never")
        raise ValueError("no shard 17 in the index")
    if RANK == 3:
        wait_for("fail")
        raise KeyError("lr")
    wait_for("never")
    """
    with LocalRun(tmp_path, script, nproc=2, options=("--max-restarts", "0")) as run:
        run.wait_moments("here", count=4)
        run.say("go")
        run.wait_moments("lingers", count=1)
        stderr = run.rank(0).stderr
        run.until(lambda: stderr.exists() and "shard 17" in stderr.read_text(), "traceback of rank 0")
        run.say("fail")
        assert run.finish() != ExitCode.OK
        verdict = run.report()["verdict"]
        failure = verdict["failure"]
        assert (failure["global_rank"], failure["exception_type"]) == (0, "ValueError")
        assert 0 < failure["printed_ns"] < failure["stopped_ns"] < failure["ended_ns"]
        assert verdict["confidence"] in ("low", "tie")
        assert [one["global_rank"] for one in verdict["candidates"]] == [3]


def test_script_that_is_not_there_any_more_is_not_tried_again(tmp_path: Path) -> None:
    script = _MEET + "if RANK == 0:\n    os.unlink(sys.argv[0])\n    sys.exit(1)\nwait_for('never')\n"
    with LocalRun(tmp_path, script) as run:
        assert run.finish() == ExitCode.NOT_RETRYABLE
        assert {event["round"] for event in run.events("round_final")} == {0, 1}
        assert f"can't open file '{run.script_path}': [Errno 2] No such file or directory" in run.log()
        text = run.attempt().report_text.read_text()
        assert "can't open file" in text
        assert "the script could not start" in text


def test_command_that_cannot_be_executed_is_not_tried_again(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/nonexistent/interpreter\n")
    program.chmod(0o755)
    with LocalRun(tmp_path, "", interpreter=["--no-python", str(program)]) as run:
        assert run.finish() == ExitCode.NOT_RETRYABLE
        assert len(run.events("start_refused")) in (1, 2)  # the second node may hear of the first before it starts
        log = run.log()
        assert str(program) in log
        assert "/nonexistent/interpreter" in log or "interpreter" in log


def test_daemon_of_a_finished_worker_is_ended(tmp_path: Path) -> None:
    script = """
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    tell("here")
    if RANK == 1:
        wait_for("end")
    """
    with LocalRun(tmp_path, script) as run:
        run.wait_moments("here", count=2)
        # At once, and not only at the end of the run, for which node 1 keeps everybody waiting.
        run.until(lambda: run.events("workers_succeeded"), "end of node 0's worker")
        run.until(lambda: len(sleepers(run)) < 2, "end of what node 0's worker left running")
        assert [process.environ["RANK"] for process in sleepers(run)] == ["1"]
        run.finish_well()


def test_children_of_a_failed_worker_are_ended_before_the_next_round(tmp_path: Path) -> None:
    script = """
    if ROUND == 0:
        plain = subprocess.Popen(["sleep", "1000"])
        daemon = subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 1000 & wait"], start_new_session=True)
        stubborn = subprocess.Popen([sys.executable, "-c",
            "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(1000)"],
            stdout=subprocess.PIPE)
        stubborn.stdout.readline()
        tell("here")
        others_in_round()
        if RANK == 1:
            os._exit(1)
        wait_for("never")
    tell("again")
    wait_for("end")
    """
    with LocalRun(tmp_path, script, options=["--shutdown-timeout", "1"]) as run:
        run.wait_moments("again", count=1)
        left = [process for process in run.processes() if process.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"]
        assert left == []
        run.finish_well()
        stopped = [event for event in run.events("workers_stopped") if event["round"] == 0]
        assert all(event["killed"] > 0 for event in stopped)
        assert not any(event["left"] for event in stopped)


def test_a_run_beside_it_is_not_touched(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    theirs.mkdir()
    # In the same runs folder too: only the ids differ.
    with LocalRun(theirs, _UNTIL_TOLD) as other:
        before = other.wait_moments("here", count=2, round_index=0)
        with LocalRun(ours, _UNTIL_TOLD, runs_dir=other.runs) as run:
            run.wait_moments("here", count=2, round_index=0)
            run.kill_worker(1, round_index=0)
            run.wait_moments("here", count=2, round_index=1)
            os.kill(run.agent(0).pid, signal.SIGKILL)
            run.wait_moments("here", count=2, round_index=2)
            run.signal(signal.SIGINT)
            assert run.finish() == ExitCode.INTERRUPTED
        other.say("end")
        assert other.finish() == ExitCode.OK
        assert other.moments("here") == sorted(before, key=lambda value: value["t"])


def test_a_worker_killed_while_its_group_is_being_stopped_failed_by_itself(tmp_path: Path) -> None:
    """Its peers see its connections close before its agent sees its end: their failure may begin the stop."""
    script = """
signal.signal(signal.SIGTERM, lambda *_: tell("told"))
tell("here")
others_in_round()
if RANK == 0:
    wait_for("fail")
    raise ValueError("a consequence, say")
wait_for("never")
"""
    with LocalRun(tmp_path, script, options=["--max-restarts", "0", "--shutdown-timeout", "60"]) as run:
        run.wait_moments("here", count=2)
        run.say("fail")
        run.wait_moments("told", count=1)
        run.kill_worker(1, round_index=0)
        assert run.finish() == ExitCode.WORKERS_FAILED
        ends = {end["rank"]: end for event in run.events("workers_stopped") for end in event["ends"]}
        assert (ends[1]["exitcode"], ends[1]["stopped"]) == (-9, False)
        (killed,) = (event for event in run.events("worker_failed") if event["rank"] == 1)
        assert killed["failure_class"] == "root"
