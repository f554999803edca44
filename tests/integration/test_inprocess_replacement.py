"""One worker dies under `--restart-policy in-process`: it alone is replaced; give-up goes on to the outer levels."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path

import pytest

from hpc_elastic.run.paths import ExitCode
from tests.rigs.local_run import LocalRun

pytestmark = pytest.mark.torch

_HEAD = """
import torch
import torch.distributed as dist
import hpc_elastic.inprocess as inprocess


def join(call):
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store = dist.PrefixStore(f"round{ROUND}/iteration{call.iteration}", store)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    value = torch.ones(1)
    dist.all_reduce(value)
    return rank, int(value.item())


def all_have_told(iteration):
    # Who fails waits for this: a rank that is interrupted sooner tells nothing.
    first, last = f"{ATTEMPT}-{ROUND}-", f"-here{iteration}"
    while sum(name.startswith(first) and name.endswith(last) for name in os.listdir(FOLDER)) < 2:
        time.sleep(0.01)
"""

# Attempt 0, round 0: each rank dies once; then the group gives up. Round 1: it gives up at once. Attempt 1 is well.
_THREE_RINGS = (
    _HEAD
    + """
@inprocess.Wrapper(initialize=inprocess.initialize.RetryController(max_iterations=3))
def train(call: inprocess.CallWrapper):
    rank, total = join(call)
    tell(f"here{call.iteration}", iteration=call.iteration, now=rank, total=total)
    if ATTEMPT == 0:
        all_have_told(call.iteration)
        if ROUND == 0 and call.iteration < 2:
            if rank == 1 - call.iteration:
                os.kill(os.getpid(), signal.SIGKILL)
        elif rank == 1:
            raise inprocess.exception.RestartAbort("planted") if ROUND else ValueError("planted")
        dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    return call.iteration

tell("result", iteration=train())
"""
)


def test_a_dead_worker_is_replaced_and_what_the_ring_gives_up_goes_on_to_agents_and_queue(tmp_path: Path) -> None:
    options = ["--restart-policy", "in-process", "--max-restarts", "1", "--max-same-failures", "0"]
    options += ["--max-requeues", "1"]
    with LocalRun(tmp_path, _THREE_RINGS, nodes=2, options=options) as run:
        assert run.finish(within=240) == ExitCode.OK
        here = [value for iteration in range(3) for value in run.moments(f"here{iteration}")]
        first = {(value["iteration"], value["now"]): value for value in here if value["round"] == value["attempt"] == 0}
        assert sorted(first) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
        assert {value["total"] for value in first.values()} == {2}
        pids = {place: value["pid"] for place, value in first.items()}
        assert pids[0, 0] == pids[1, 0], "whoever lives keeps its process"
        assert pids[1, 1] == pids[2, 1], "the fresh one too, when the other one dies"
        assert pids[0, 1] != pids[1, 1]
        assert pids[1, 0] != pids[2, 0], "rank 0, beside which nothing special runs"

        replaced = run.events("worker_replaced")
        assert [(event["round"], event["rank"], event["exitcode"]) for event in replaced] == [(0, 1, -9), (0, 0, -9)]
        assert [(event["old_pid"], event["pid"]) for event in replaced] == [
            (pids[0, 1], pids[1, 1]),
            (pids[1, 0], pids[2, 0]),
        ]
        restarts = run.events("ring_restarted")
        assert [(event["iteration"], event["world_size"], event["joined"]) for event in restarts] == [
            (1, 2, [1]),
            (2, 2, [0]),
            (3, 2, []),
        ]
        for event, dead in zip(restarts, (1, 0), strict=False):
            assert [dead, "TERMINATED"] in event["interruptions"]
        assert {event["round"] for event in run.events("ring_gave_up")} == {0, 1}
        assert run.events("replacement_refused")

        # The three levels in one report: the last attempt's tells of all.
        report = run.report(1)
        before, after = report["attempts"]
        assert [part["index"] for part in before["rounds"]] == [0, 1]
        told = before["rounds"][0]["in_process"]
        assert [(part["iteration"], part["joined"]) for part in told if not part["gave_up"]] == [
            (1, [1]),
            (2, [0]),
            (3, []),
        ]
        assert "no further restart within the processes: iteration 3" in told[-1]["gave_up"]
        assert "planted" in before["rounds"][1]["in_process"][-1]["gave_up"]
        assert after["outcome"] == "succeeded"
        text = run.attempt(1).report_text.read_text()
        assert "3 restarts within the processes" in text
        assert "the in-process restart group gave up: RestartAbort: no further restart" in text


_LOST_NODE = (
    _HEAD
    + """
@inprocess.Wrapper()
def train(call: inprocess.CallWrapper):
    rank, total = join(call)
    tell(f"here{call.iteration}", iteration=call.iteration, now=rank, total=total)
    if ROUND == 0:
        dist.all_reduce(torch.ones(1)) if rank else time.sleep(1000)
    dist.destroy_process_group()
    return call.iteration

tell("result", iteration=train())
"""
)


@pytest.mark.parametrize("policy", ["in-process", pytest.param("processes", marks=pytest.mark.slow)])
def test_the_loss_of_the_stores_node_is_a_restart_of_the_agents(tmp_path: Path, policy: str) -> None:
    options = ["--restart-policy", policy]
    with LocalRun(tmp_path, _LOST_NODE, nodes=2, options=options) as run:
        run.until(lambda: len(run.moments("here0")) == 2, "all in the function", within=120)
        agent = run.agent(0)
        for process in (agent, *run.below(agent), *run.tagged(0)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        assert run.finish(within=120) == ExitCode.OK
        assert [value["iteration"] for value in run.moments("result", round_index=1)] == [0, 0]
        (gave_up,) = run.events("ring_gave_up")
        assert gave_up["reason"].startswith("InternalError: the restart group's store fails")
        text = run.attempt(0).report_text.read_text()
        assert float(re.findall(r"cost (\d+\.\d) s: the agent on node0 died", text)[0]) < 20, text
        assert "the agent on node0 died" in text
        assert "1 failure elsewhere is its consequence" in text
        assert "a new round, which costs no restart" in text


# The fresh process comes late on purpose, so that it is the spare that is seen to take over.
_SPARE = (
    """
if os.environ.get("HPC_ELASTIC_RING_REPLACES"):
    wait_for("come")
"""
    + _HEAD
    + """
@inprocess.Wrapper(rank_filter=inprocess.rank_filter.MaxActiveWorldSize(2))
def train(call: inprocess.CallWrapper):
    rank, total = join(call)
    tell(f"here{call.iteration}", iteration=call.iteration, now=rank, total=total)
    if call.iteration == 0:
        all_have_told(0)
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))
    while not is_said("end"):
        time.sleep(0.01)
    dist.destroy_process_group()
    return call.iteration

tell("result", iteration=train())
"""
)


@pytest.mark.parametrize("start_method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_spare_takes_a_dead_workers_place_at_once_and_the_fresh_process_is_the_next_spare(
    tmp_path: Path, start_method: str
) -> None:
    options = ["--restart-policy", "in-process"]
    with LocalRun(tmp_path, _SPARE, nodes=1, nproc=3, options=options, start_method=start_method) as run:
        run.until(lambda: len(run.moments("here1")) >= 2, "restart with the spare", within=120)
        before = {value["now"]: value["pid"] for value in run.moments("here0")}
        after = {value["now"]: value["pid"] for value in run.moments("here1")}
        assert after[0] == before[1], "all closed up, in rank order"
        assert after[1] not in before.values(), "the third rank had waited"
        (replaced,) = run.until(lambda: run.events("worker_replaced"), "fresh process", within=120)
        assert after[1] != replaced["pid"]
        run.say("come")
        run.say("end")
        assert run.finish(within=120) == ExitCode.OK
        results = {value["pid"]: value["iteration"] for value in run.moments("result")}
        assert results.pop(replaced["pid"]) is None, "no fault came any more"
        assert sorted(results) == sorted(after.values())
        assert {event["started_fresh"] for event in run.events("workers_started")} == {""}
        assert "started fresh" not in run.log()
