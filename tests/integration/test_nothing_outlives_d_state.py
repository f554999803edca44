"""Workers that not even SIGKILL reaches: named, told of and left after a bound; the node goes on without them."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_elastic.run.paths import ExitCode
from tests.rigs.local_run import LocalRun
from tests.rigs.nfs_emulator import require_fuse
from tests.rigs.processes import is_alive, state_of
from tests.rigs.silent_mount import SilentMount
from tests.rigs.waiting import until

_STUCK = """
if ROUND == 0 and RANK == 1:
    tell("here")
    open(os.environ["NEVER"], "rb").read()
tell("here")
if ROUND == 0:
    wait_for("fail")
    os._exit(1)
wait_for("end")
"""
_WORDS = "it sits in an uninterruptible system call"


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[SilentMount]:
    require_fuse()
    with SilentMount(tmp_path / "silent") as mount:
        yield mount


@pytest.mark.parametrize("is_killed", [False, True])
def test_worker_that_cannot_be_ended_is_told_of_and_left(tmp_path: Path, mount: SilentMount, is_killed: bool) -> None:
    """By the agent that stops it, after 5 s; where that was killed, by the one that follows it, after 5 s more."""
    run = LocalRun(tmp_path, _STUCK, nodes=2, environ={"NEVER": str(mount.file)}, options=["--shutdown-timeout", "0.5"])
    with run:
        here = run.wait_moments("here", count=2, round_index=0)
        stuck = here[1]["pid"]
        until(lambda: mount.was_asked and state_of(stuck) in "DS", what="its wait")
        if is_killed:
            os.kill(run.agent(1).pid, signal.SIGKILL)
        else:
            run.say("fail")
        run.wait_moments("here", count=2, round_index=1)
        assert state_of(stuck) == "D", "it is still there"
        if is_killed:
            assert f"process {stuck} " in run.log()
            assert "of an earlier agent here does not end; it may hold devices" in run.log()
        else:
            (event,) = run.until(
                lambda: [event for event in run.events("workers_stopped") if event["node"] == 1],
                "the event of its stop",
            )
            assert stuck in event["left"]
            assert 5.0 <= event["seconds"] < 15.0, "half a second of grace, and the bound"
            assert _WORDS in run.log()
        run.finish_well()
        mount.release()
        until(lambda: not is_alive(stuck), what="its end, once the mount has gone")
        run.check_nothing_left(within=60)


# Python starts programs by vfork: until its child has loaded the program, the worker waits for it in the kernel.
_STARTS_A_PROGRAM = """
import hpc_elastic
tell("here")
hpc_elastic.heartbeat(step=3)
if ROUND == 0 and RANK == 1:
    with hpc_elastic.section("save"):
        subprocess.run([os.environ["NEVER"]])
if ROUND == 0:
    time.sleep(1000)
tell("done")
"""


def test_a_child_that_hangs_before_its_program_runs_is_named(tmp_path: Path, mount: SilentMount) -> None:
    run = LocalRun(
        tmp_path,
        _STARTS_A_PROGRAM,
        environ={"NEVER": str(mount.file)},
        options=["--section-timeouts", "save:1.5", "--shutdown-timeout", "0.5"],
    )
    with run:
        run.wait_moments("done", count=2, round_index=1)
        assert mount.was_asked
        assert run.finish() == ExitCode.OK
        failure = run.report()["verdict"]["failure"]
        assert (failure["global_rank"], failure["failure_class"], failure["category"]) == (1, "hang", "infrastructure")
        assert failure["fingerprint"] == "hang:kernel"
        child = re.search(
            r"it waited for its child (\d+) to begin its program, which sat in .*execve", failure["reason"]
        )
        assert child, failure["reason"]
        text = run.attempt().report_text.read_text()
        assert re.search(rf"  rank 1: no Python stack; D .*; its child {child[1]} \(", text), text
        assert "  rank 0: <module> (train.py:" in text, "the other node's stacks are there all the same"
        assert re.search(r"  rank 1: at step 3, section 'save', silent for \d\.\d s", text)
        stacks = run.rank(1).stacks.read_text()
        assert f"  child {child[1]} " in stacks
        assert "it sits in an uninterruptible system call" in run.log(), "it was left, and that was told"
        mount.release()
        until(lambda: not is_alive(int(child[1])), what="its end, once the mount has gone")
        run.check_nothing_left(within=60)
