"""Workers that hang: named by their heartbeats, with the stacks of all ranks."""

from __future__ import annotations

import pytest

from tests.rigs.failure_catalogue import Catalogue, Told

# Rank 1 stays in step 4. The others come to step 5 and wait there, in a section that nobody is judged in.
_SCRIPT = """
import ctypes, hpc_elastic, threading

def wait_for_all_gradients():
    with hpc_elastic.section("all_reduce"):
        time.sleep(1000)  # one call: a loop could be found in another line

def save_checkpoint():
    {how}

tell("here")
others_in_round()
for step in range(5):
    hpc_elastic.heartbeat(step=step)
if RANK == 1:
    save_checkpoint()
hpc_elastic.heartbeat(step=5)
wait_for_all_gradients()
"""
_SILENT = "no progress; killed after the stacks of all ranks were taken (stacks.txt)"
_STOPPED = "SIGSTOP not sent by hpc-elastic (a debugger, or a manual kill); killed"
_WAYS = {
    "deadlock": ("lock = threading.Lock(); lock.acquire(); lock.acquire()", _SILENT),
    "held-gil": ("ctypes.PyDLL(None).sleep(1000)", _SILENT),
    "stopped-worker": ("os.kill(os.getpid(), signal.SIGSTOP)", _STOPPED),
}


@pytest.mark.parametrize("name", _WAYS)
def test_a_worker_that_hangs(catalogue: Catalogue, name: str) -> None:
    how, kind = _WAYS[name]
    script = _SCRIPT.format(how=how)
    with catalogue.run(script, nproc=2, options=["--section-timeouts", "step:2"]) as run:
        run.finish()
        expected = Told(
            exit_code=124,
            cause="hang: no heartbeat for <N> s in section 'step' at step 4 (timeout <N> s)",
            rank=1,
            host="node0",
            failure_class="hang",
            category="worker",
            retryable=True,
            confidence="high",
            evidence="furthest behind: 3 other ranks had got to step 5",
            kind=kind,
        )
        catalogue.check(run, name, expected)
        assert "save_checkpoint" in run.report()["verdict"]["failure"]["traceback"]
