"""A node that was frozen in the middle of a save thaws after the others went on: nothing of its workers arrives."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from tests.rigs.local_run import LocalRun
from tests.rigs.processes import Process

_TRAINING = """
import hpc_elastic
from pathlib import Path

LOCAL, GROUP = int(os.environ["LOCAL_RANK"]), int(os.environ["GROUP_RANK"])
signal.signal(signal.SIGTERM, lambda *_: (tell("term"), save(f"late-{ROUND}"), os._exit(0)))


def save(what):
    temporary = f"{what}.{os.getpid()}.tmp"
    Path(temporary).write_text(what)
    hpc_elastic.commit(temporary, "checkpoint")


hpc_elastic.heartbeat(0)
tell("here")
if ROUND == 0 and LOCAL == 0:
    for name in ("first", "second"):
        wait_for(f"save-{name}")
        save(name)
        tell(f"saved-{name}")
elif ROUND == 1 and RANK == 0:
    save("newer")
    tell("saved-newer")
steps = 0
while not is_said("end"):
    steps += 1
    hpc_elastic.heartbeat(steps)
    Path(f"steps-{os.getpid()}.tmp").write_text(str(steps))
    os.replace(f"steps-{os.getpid()}.tmp", f"steps-{os.getpid()}")
    time.sleep(0.01)
"""


def _freeze(run: LocalRun, node: int) -> list[Process]:
    """All that runs on a node: the agent, its guardian, the workers."""
    agent = run.agent(node)
    frozen = [agent, *run.below(agent)]
    for process in frozen:
        os.kill(process.pid, signal.SIGSTOP)
    return frozen


def _thaw(frozen: list[Process]) -> None:
    for process in frozen:
        with contextlib.suppress(ProcessLookupError):  # the agent, thawed first, has killed a stale worker
            os.kill(process.pid, signal.SIGCONT)


def test_a_node_that_thaws_too_late_commits_nothing_and_makes_no_step(tmp_path: Path) -> None:
    with LocalRun(tmp_path, _TRAINING, nodes=2, min_nodes=1, nproc=2) as run:
        run.wait_moments("here", count=4, round_index=0)
        saver, stepper = (run.worker(rank, round_index=0) for rank in (0, 1))
        agent, *others = _freeze(run, 0)
        run.say("save-first")
        time.sleep(1.0)
        _thaw([agent, *others])  # the others have not noticed it: all goes on
        run.wait_moments("saved-first", count=1, round_index=0)

        agent, *others = _freeze(run, 0)
        run.say("save-second")
        run.wait_moments("saved-newer", count=1, round_index=1)
        steps = int((tmp_path / f"steps-{stepper}").read_text())
        workers = [process for process in others if process.pid in (saver, stepper)]
        _thaw(workers)  # while no agent reads the record for them
        time.sleep(1.0)
        assert run.is_alive(saver)
        assert run.is_alive(stepper)
        _thaw([agent, *others])
        run.until(lambda: not run.is_alive(saver) and not run.is_alive(stepper), "end of the stale workers")
        assert int((tmp_path / f"steps-{stepper}").read_text()) <= steps + 1
        run.until(lambda: [e for e in run.moments("here") if e["round"] > 1], "round with both again")
        assert (tmp_path / "checkpoint").read_text() in ("newer", "late-1")  # whose node had its grace for the growth
        assert not [e for e in run.moments("term") if e["pid"] in (saver, stepper)]
        assert "round 0 went on without this node" in run.log()
        run.finish_well()
