"""Where every failure so far is a symptom: a moment for the ranks, and a look at the silent ones. Elsewhere neither."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from hpc_elastic.run.paths import ExitCode
from tests.rigs.local_run import LocalRun

ALONE = ("--max-restarts", "0", "--max-requeues", "0")
GROUP = """
import datetime, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
dist.all_reduce(torch.ones(4))
tell("here")
others_in_round()
"""


@pytest.mark.torch
def test_a_rank_that_is_about_to_fail_gets_a_moment(tmp_path: Path) -> None:
    """It leaves the group, and fails when an agent has seen the first of the others fail for that."""
    script = (
        GROUP
        + """
if RANK != 2:
    while True:
        dist.all_reduce(torch.ones(4))
others = [int(name.split("-")[3]) for name in os.listdir(FOLDER) if name.endswith("-here")]
dist.destroy_process_group()
def is_alive(pid):
    return os.path.exists(f"/proc/{pid}") and ") Z" not in open(f"/proc/{pid}/stat").read()
while all(map(is_alive, others)):
    time.sleep(0.01)
time.sleep(0.1)
raise ValueError("lr=-1")
"""
    )
    with LocalRun(tmp_path, script, nproc=2, options=ALONE) as run:
        assert run.finish() != ExitCode.OK
        failure = run.report()["verdict"]["failure"]
        assert (failure["global_rank"], failure["message"]) == (2, "ValueError: lr=-1")


@pytest.mark.torch
def test_a_silent_rank_with_a_handler_for_sigterm_is_looked_at_and_not_aborted(tmp_path: Path) -> None:
    script = (
        GROUP
        + """
def save(*_):
    tell("saved")
    os._exit(0)

def fetch():
    time.sleep(100)

if RANK == 1:
    signal.signal(signal.SIGTERM, save)
    fetch()
dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=2))
dist.all_reduce(torch.ones(4))
"""
    )
    with LocalRun(tmp_path, script, nproc=2, options=ALONE) as run:
        assert run.finish() != ExitCode.OK
        assert len(run.moments("saved")) == 1
        verdict = run.report()["verdict"]
        assert (verdict["cause"], [suspect["rank"] for suspect in verdict["suspects"]]) == ("unknown", [1])
        assert "it was asleep" in verdict["suspects"][0]["why"]


@pytest.mark.torch
def test_the_address_of_a_lost_peer_is_a_rank_and_the_first_suspect(tmp_path: Path) -> None:
    """Two ranks are silent; the address in the only failure shows which of them left its connections."""
    script = (
        GROUP
        + """
wait_for("sockets")
if RANK == 2:
    dist.destroy_process_group()
if RANK in (0, 2):
    time.sleep(100)
dist.all_reduce(torch.ones(4))
"""
    )
    began = time.monotonic()
    with LocalRun(tmp_path, script, nproc=2, options=ALONE) as run:
        run.wait_moments("here", count=4)
        ends = began + max(4.0, 1.4 * (time.monotonic() - began)) + 0.5
        run.until(lambda: time.monotonic() > ends, "the next look at the sockets, which comes by then")
        run.say("sockets")
        assert run.finish() != ExitCode.OK
        verdict = run.report()["verdict"]
        assert [suspect["rank"] for suspect in verdict["suspects"]] == [2, 0]
        assert "rank 1 lost the connection to it ([127.0.0.1]:" in verdict["suspects"][0]["why"]
        assert "of rank 1 is rank 2 (node1)" in verdict["evidence"]


@pytest.mark.parametrize("how", ["raise ValueError('lr=-1')", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_where_a_cause_is_known_nothing_is_waited_for_and_no_rank_is_asked(tmp_path: Path, how: str) -> None:
    script = f"""
    tell("here")
    others_in_round()
    if ROUND == 0 and RANK == 1:
        {how}
    if ROUND == 0:
        wait_for("never")
    """
    with LocalRun(tmp_path, script, nproc=2) as run:
        assert run.finish() == ExitCode.OK
        assert run.events("ranks_observed") == run.events("stacks_taken") == []
        (failed,) = run.events("worker_failed")
        assert failed["exitcode"] in (1, -signal.SIGKILL)
        began = min(event["t"] for event in run.events("workers_stopping") if event["round"] == 0)
        assert began - failed["ended_ns"] < 0.5e9
