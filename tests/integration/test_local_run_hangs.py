"""Workers that hang under the local launcher: found by their heartbeats, named with their stacks, started again."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

from hpc_elastic.agent.heartbeats import PREFIX
from hpc_elastic.run.paths import ExitCode
from tests.rigs.local_run import LocalRun
from tests.rigs.requirements import require
from tests.rigs.waiting import until

# Rank 2 stays in step 4 while the others have got to step 5, where they wait for it as in a collective.
_ONE_HANGS = """
import hpc_elastic, threading

def innermost():
    os.kill(os.getpid(), signal.SIGSTOP)

def wait_in_a_collective():
    threading.Event().wait()

def keep_loading():
    threading.Event().wait()

threading.Thread(target=keep_loading, daemon=True).start()
tell("here")
others_in_round()
for step in range(5):
    hpc_elastic.heartbeat(step=step)
if ROUND == 0 and RANK == 2:
    innermost()
hpc_elastic.heartbeat(step=5)
if ROUND == 0:
    wait_in_a_collective()
"""


def test_the_worker_that_hangs_is_named_with_its_stack(tmp_path: Path) -> None:
    """Stopped: the catalogue has other ways; here the other threads and the other node are looked at."""
    with LocalRun(tmp_path, _ONE_HANGS, nproc=2, options=["--section-timeouts", "step:2.5"]) as run:
        assert run.finish() == ExitCode.OK
        assert len(run.moments("here", round_index=1)) == 4

        verdict = run.report()["verdict"]
        failure = verdict["failure"]
        assert (failure["global_rank"], failure["failure_class"], failure["last_step"]) == (2, "hang", 4)
        assert "in innermost" in failure["traceback"]
        assert "in section 'step' at step 4" in verdict["summary"]
        assert "3 other ranks had got to step 5" in verdict["evidence"]
        text = run.attempt().report_text.read_text()
        assert "rank 2: innermost (train.py:" in text
        assert "ranks 0-1,3: wait (threading.py:" in text
        assert "  other threads: 1 more place (--all shows them; stacks.txt has all)" in text
        assert re.search(r"  rank 2: at step 4, section 'step', silent for \d[\d.]* s", text)
        assert re.search(r"  ranks 0-1,3: at step 5, section 'step', silent for \d[\d.-]* s", text)
        (round_0, _) = run.report()["attempts"][0]["rounds"]
        (other,) = round_0["threads"]
        assert other["ranks"] == "0-3"
        assert any(frame.endswith(" keep_loading") for frame in other["stack"])

        # All ranks' stacks were taken, on the other node too, where nobody hung.
        for rank in range(4):
            stacks = run.rank(rank).stacks.read_text()
            assert ("in innermost" if rank == 2 else "in wait_in_a_collective") in stacks
        assert "state T (stopped)" in run.rank(2).stacks.read_text()
        assert failure["fingerprint"] == "hang:stopped"
        (told,) = {event["restarts_used"] for event in run.events("round_final") if event["round"] == 1}
        assert told == 1


def test_who_is_waited_for_is_named_though_only_the_waiting_are_judged(tmp_path: Path) -> None:
    """The one that hangs is in a section without a timeout, on another node than the one that is found silent."""
    script = """
    import hpc_elastic
    tell("here")
    others_in_round()
    hpc_elastic.heartbeat(step=7)
    if ROUND == 0 and RANK == 1:
        with hpc_elastic.section("load"):
            wait_for("never")
    hpc_elastic.heartbeat(step=8)
    if ROUND == 0:
        wait_for("never")
    """
    with LocalRun(tmp_path, script, options=["--section-timeouts", "step:1.5"]) as run:
        assert run.finish() == ExitCode.OK
        assert "rank 0 hangs: no heartbeat for" in run.log()
        verdict = run.report()["verdict"]
        assert verdict["failure"]["global_rank"] == 1
        assert "in section 'load' at step 7, while others are at step 8 and wait" in verdict["summary"]
        opened = [event["reason"] for event in run.events("round_frozen") if event["round"] == 1]
        assert "rank 1: hang:" in opened[0], "the restart is told with its cause"


def test_a_hang_before_the_first_heartbeat_below_a_shell_ends_with_124(tmp_path: Path) -> None:
    script = """
    def import_something_on_a_hung_mount():
        tell("here")
        wait_for("never")
    import_something_on_a_hung_mount()
    """
    shell = tmp_path / "wrapper.sh"
    shell.write_text(f"#!/bin/sh\n{sys.executable} -S -u {tmp_path}/train.py\nexit $?\n")  # it is to be there in time
    shell.chmod(0o755)
    options = ["--section-timeouts", "setup:4,step:100", "--max-restarts", "0"]
    with LocalRun(tmp_path, script, nodes=1, interpreter=["--no-python", str(shell)], options=options) as run:
        assert run.finish() == ExitCode.HANG
        verdict = run.report()["verdict"]
        assert "in section 'setup' (timeout 4 s)" in verdict["summary"]
        assert "import_something_on_a_hung_mount" in verdict["failure"]["traceback"]
        assert verdict["failure"]["last_step"] is None


def test_heartbeats_leave_nothing_on_the_node_also_when_the_agent_is_killed(tmp_path: Path) -> None:
    script = """
    import hpc_elastic
    hpc_elastic.heartbeat(step=10 * ROUND + 3)
    tell("here", beats=os.environ["HPC_ELASTIC_HEARTBEAT"])
    wait_for("end")
    """
    with LocalRun(tmp_path, script) as run:
        here = run.wait_moments("here", count=2, round_index=0)
        folders = {Path(value["beats"]).parent for value in here}
        assert len(folders) == 2
        for folder in folders:
            assert folder.name.startswith(PREFIX + run.uid)
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        gone = Path(next(value["beats"] for value in here if value["rank"] == 1)).parent
        # A later agent of this user, of another run too, clears up what dead ones left: not where the lock is held.
        with open(gone / "alive", "r+b") as alive:
            held = threading.Thread(target=fcntl.lockf, args=(alive, fcntl.LOCK_EX))
            held.start()
            os.kill(run.agent(1).pid, signal.SIGKILL)
            held.join()
            until(lambda: not gone.exists(), "the guardian to remove it")
        run.wait_moments("here", count=2, round_index=1)
        run.finish_well()
        assert [folder for folder in folders if folder.exists()] == []
        # What the nodes told last: read when the workers ended, however short the run was.
        words = {word["rank"]: word["step"] for word in run.report()["attempts"][0]["rounds"][-1]["heartbeats"]}
        assert words == {0: 13, 1: 13}


_OWN_SHM = """
import hpc_elastic
hpc_elastic.heartbeat(step=1)
tell("here")
wait_for("end")
"""


def test_a_worker_with_a_dev_shm_of_its_own_is_warned_and_not_judged(tmp_path: Path) -> None:
    """As in a container: it can send no heartbeats, and is healthy."""
    inside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    probe = subprocess.run([*inside, "mount -t tmpfs tmpfs /dev/shm"], capture_output=True, text=True)
    require("a user namespace", probe.stderr.strip() if probe.returncode else "")
    line = f"mount -t tmpfs tmpfs /dev/shm && {sys.executable} {tmp_path / 'train.py'}"
    options = ["--section-timeouts", "setup:1,step:60", "--max-restarts", "0"]
    with LocalRun(tmp_path, _OWN_SHM, options=options, interpreter=["--no-python", *inside, line]) as run:
        run.wait_moments("here", count=2)
        run.until(lambda: run.log().count("can send no heartbeats, and is not judged") == 2, "both agents' warnings")
        run.finish_well()
        assert run.log().count("this worker's heartbeats and notices are off") == 2
