"""The job is about to end: workers save after one step, on all nodes, and the next attempt goes on from there."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from hpc_elastic.run.paths import ExitCode
from tests.rigs.local_run import LocalRun

_ASKS = """
import hpc_elastic
tell("here")
others_in_round()
if ATTEMPT:
    sys.exit(0)
step = 0
knows = False
while True:
    notice = hpc_elastic.preemption_notice()
    if not knows and notice is not None and notice.is_agreed:
        knows = True
        tell("knows")
    time.sleep(0.02 + 0.005 * RANK)  # no collective keeps these ranks together
    if step == 3:
        tell("trains")
    if not is_said("go-on") and step > 3:
        continue
    if hpc_elastic.should_checkpoint(step):
        tell("saved", step=step, agreed=hpc_elastic.preemption_notice().step)
        FINISH
    step += 1
"""
_ENDS = _ASKS.replace("FINISH", "sys.exit(0)")
_STAYS = _ASKS.replace("FINISH", "hpc_elastic.checkpoint_done(); wait_for('never')")
_NEVER_SAVES = _ASKS.replace("FINISH", "wait_for('never')")
_IS_DONE = """
import hpc_elastic
from hpc_elastic.worker_api.heartbeat import notice_is_there
tell("here")
others_in_round()
while not notice_is_there():
    ASK
    time.sleep(0.01)
for _ in range(20):
    ASK
    time.sleep(0.01)
tell("done")
"""
_SAVES_BESIDE = """
import hpc_elastic, threading

def save(step):
    tell("saves", step=step)
    wait_for("written")
    hpc_elastic.checkpoint_done(GIVEN)

tell("here")
others_in_round()
if ATTEMPT:
    sys.exit(0)
for step in range(10**9):
    time.sleep(0.01)
    due = hpc_elastic.should_checkpoint(step)
    if step == 7:
        beside = threading.Thread(target=save, args=[step])
        beside.start()
    if due:
        tell("due", step=step)
        beside.join()
        time.sleep(1.0)  # looks of the agent, which the earlier checkpoint must not satisfy
        with hpc_elastic.section("checkpoint"):
            tell("saved", step=step)
        wait_for("never")
"""
_HEEDS_A_SIGNAL = """
def save(number, frame):
    tell("saved", signal=number)
    sys.exit(0)

signal.signal(signal.SIGUSR1, save)
tell("here")
others_in_round()
ATTEMPT or wait_for("never")
"""
_CALLED_BACK = """
import hpc_elastic, threading
due = threading.Event()

def save(notice):
    tell("saved", here=threading.current_thread() is threading.main_thread())
    due.set()

if not ATTEMPT:
    hpc_elastic.on_preemption(save)
tell("here")
others_in_round()
if not ATTEMPT:
    due.wait()  # as in a call that no Python code interrupts
    hpc_elastic.checkpoint_done()
    wait_for("never")
"""


def test_a_callback_is_called_whatever_the_main_thread_does(tmp_path: Path) -> None:
    with LocalRun(tmp_path, _CALLED_BACK, options=["--max-requeues", "1", "--shutdown-timeout", "1"]) as run:
        run.wait_moments("here", count=2)
        run.signal(signal.SIGUSR2)
        assert run.finish() == ExitCode.OK
        assert [moment["here"] for moment in run.moments("saved")] == [False, False]
        assert "saved in" in run.log()
        assert [part["outcome"] for part in run.report(1)["attempts"]] == ["preempted", "succeeded"]


def test_all_ranks_save_after_one_step_and_the_run_is_requeued(tmp_path: Path) -> None:
    with LocalRun(tmp_path, _STAYS, nproc=2, options=["--max-requeues", "1", "--shutdown-timeout", "1"]) as run:
        run.wait_moments("trains", count=4)
        run.signal(signal.SIGUSR2)
        run.wait_moments("knows", count=4)  # who is told later than it passes the step would save one later
        assert "all workers save after step" in run.log()
        assert run.moments("saved") == []
        run.say("go-on")
        assert run.finish() == ExitCode.OK
        saved = run.moments("saved")
        assert len(saved) == 4
        assert len({moment["step"] for moment in saved}) == 1, "no rank is a step further than another"
        (step,) = {moment["agreed"] for moment in saved}
        assert f"(step {step})" in run.log()
        report = run.report(1)
        assert [part["outcome"] for part in report["attempts"]] == ["preempted", "succeeded"]
        assert "saved in" in run.log()
        assert {event["code"] for event in run.events("agent_ended", attempt=0)} == {0}


@pytest.mark.parametrize("given", ["step", ""])
def test_a_save_of_an_earlier_step_that_ends_after_the_notice_is_not_the_one_that_is_waited_for(
    given: str, tmp_path: Path
) -> None:
    script = _SAVES_BESIDE.replace("GIVEN", given)
    with LocalRun(tmp_path, script, options=["--max-requeues", "1", "--shutdown-timeout", "1"]) as run:
        run.wait_moments("saves", count=2)
        run.signal(signal.SIGUSR2)
        run.wait_moments("due", count=2)
        run.say("written")
        assert run.finish() == ExitCode.OK
        assert len(run.moments("saved")) == 2, "the attempt ended before the step was saved"
        what = "holds step 7" if given else "was reported without its step"
        assert f"a checkpoint of rank 1 {what}: step" in run.log()
        assert "saved in" in run.log()


def test_workers_that_end_with_0_after_saving_have_not_succeeded_yet(tmp_path: Path) -> None:
    with LocalRun(tmp_path, _ENDS, options=["--max-requeues", "1"]) as run:
        run.wait_moments("trains", count=2)
        run.say("go-on")
        run.signal(signal.SIGUSR2)
        assert run.finish() == ExitCode.OK
        assert [part["outcome"] for part in run.report(1)["attempts"]] == ["preempted", "succeeded"]


@pytest.mark.parametrize(
    ("ask", "options"),
    [("assert not hpc_elastic.should_checkpoint(3)", []), ("pass", ["--preemption-signal", "usr1"])],
    ids=["the step is not reached", "the signal is not sent"],
)
def test_workers_that_are_done_by_themselves_have_succeeded(tmp_path: Path, ask: str, options: list[str]) -> None:
    script = _IS_DONE.replace("ASK", ask)
    with LocalRun(tmp_path, script, nproc=2, options=[*options, "--max-requeues", "1"]) as run:
        run.wait_moments("here", count=4)
        run.signal(signal.SIGUSR2)
        assert run.finish() == ExitCode.OK
        assert len(run.moments("done")) == 4, "once"
        assert [part["outcome"] for part in run.report(0)["attempts"]] == ["succeeded"]


def test_who_does_not_save_in_time_is_named_and_the_run_is_requeued_all_the_same(tmp_path: Path) -> None:
    options = ["--grace", "6", "--max-requeues", "1", "--shutdown-timeout", "1"]
    with LocalRun(tmp_path, _NEVER_SAVES, options=options) as run:
        run.wait_moments("trains", count=2)
        run.say("go-on")
        run.signal(signal.SIGUSR2)
        run.signal(signal.SIGUSR2)  # a repeated one tells nothing new
        assert run.finish() == ExitCode.OK
        assert "node0, node1 had not saved after 4 s" in run.log()
        assert [part["outcome"] for part in run.report(1)["attempts"]] == ["preempted", "succeeded"]


@pytest.mark.parametrize(
    ("option", "number"),
    [
        (("--preemption-signal", "usr1"), signal.SIGUSR2),
        (("--signals-to-handle", "SIGTERM,SIGUSR1"), signal.SIGUSR1),
    ],
    ids=["preemption-signal", "signals-to-handle"],
)
def test_workers_get_a_signal_where_one_is_asked_for(
    tmp_path: Path, option: tuple[str, ...], number: signal.Signals
) -> None:
    with LocalRun(tmp_path, _HEEDS_A_SIGNAL, nproc=2, options=[*option, "--max-requeues", "1"]) as run:
        run.wait_moments("here", count=4)
        run.signal(number)
        assert run.finish() == ExitCode.OK
        assert [moment["signal"] for moment in run.moments("saved")] == [signal.SIGUSR1] * 4
        assert [part["outcome"] for part in run.report(1)["attempts"]] == ["preempted", "succeeded"]


def test_behind_a_shell_the_script_gets_the_signal(tmp_path: Path) -> None:
    """And one that has no handler yet gets it when it has."""
    script = _HEEDS_A_SIGNAL.replace("signal.signal(", "tell('there'); wait_for('ready'); signal.signal(", 1)
    line = ["bash", "-c", f"{sys.executable} {tmp_path / 'train.py'}; code=$?; exit $code"]
    options = ["--preemption-signal", "usr1", "--max-requeues", "1"]
    with LocalRun(tmp_path, script, options=options, interpreter=["--no-python", *line]) as run:
        run.wait_moments("there", count=2)
        run.signal(signal.SIGUSR2)
        run.until(lambda: "catches SIGUSR1: it is sent when one does" in run.log(), "a line in the log")
        run.say("ready")
        assert run.finish() == ExitCode.OK
        assert [moment["signal"] for moment in run.moments("saved")] == [signal.SIGUSR1] * 2
        assert [part["outcome"] for part in run.report(1)["attempts"]] == ["preempted", "succeeded"]


def test_the_coordinators_agent_dies_while_they_save(tmp_path: Path) -> None:
    """Another one ends the attempt, and the job is requeued."""
    options = ["--max-requeues", "1", "--shutdown-timeout", "1"]
    with LocalRun(tmp_path, _STAYS, options=options) as run:
        run.wait_moments("trains", count=2)
        run.signal(signal.SIGUSR2)
        run.until(lambda: "all workers save after step" in run.log(), "word that a step is agreed")
        run.kill_agent_in_a_round(0)
        assert run.finish() == ExitCode.OK
        assert [part["outcome"] for part in run.report(1)["attempts"]] == ["preempted", "succeeded"]
