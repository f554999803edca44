"""In-process restart under an agent: it restarts the function; when it gives up, the agent restarts the processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_elastic.run.paths import ExitCode
from tests.rigs.local_run import LocalRun

pytestmark = pytest.mark.torch

# With the restart group's default store: a client of the agents' own, which is a new one in each round.
_TRAINING = """
import hpc_elastic
import torch
import torch.distributed as dist
import hpc_elastic.inprocess as inprocess

def both_have_told(iteration):
    # Who fails waits for this: a rank that is interrupted sooner tells nothing.
    first, last = f"{ATTEMPT}-{ROUND}-", f"-here{iteration}"
    while sum(name.startswith(first) and name.endswith(last) for name in os.listdir(FOLDER)) < 2:
        time.sleep(0.01)


@inprocess.Wrapper(initialize=inprocess.initialize.RetryController(max_iterations=3))
def train(call: inprocess.CallWrapper):
    hpc_elastic.heartbeat(call.iteration)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store = dist.PrefixStore(f"round{ROUND}/iteration{call.iteration}", store)
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    value = torch.ones(1)
    dist.all_reduce(value)
    tell(f"here{call.iteration}", iteration=call.iteration, total=value.item())
    both_have_told(call.iteration)
    if RANK == 1 and (ROUND == 0 or call.iteration == 0):
        raise ValueError("planted")
    if ROUND == 0 or call.iteration == 0:
        dist.all_reduce(value)
    dist.destroy_process_group()
    return call.iteration

tell("result", iteration=train())
"""


def test_the_function_restarts_in_its_processes_until_the_ring_gives_up(tmp_path: Path) -> None:
    with LocalRun(tmp_path, _TRAINING, nodes=2) as run:
        assert run.finish(within=240) == ExitCode.OK
        here = [value for iteration in range(3) for value in run.moments(f"here{iteration}")]
        for round_index, iterations in ((0, [0, 1, 2]), (1, [0, 1])):
            for rank in (0, 1):
                mine = [value for value in here if (value["round"], value["rank"]) == (round_index, rank)]
                assert [value["iteration"] for value in mine] == iterations
                assert {value["total"] for value in mine} == {2.0}
                assert len({value["pid"] for value in mine}) == 1, "the processes stay"
        assert [value["iteration"] for value in run.moments("result")] == [1, 1]
        # What the restart group gave up with is the evidence of the agents' restart: of one rank, or of both at once.
        roots = [event for event in run.events("worker_failed") if event["failure_class"] == "root"]
        assert {event["round"] for event in roots} == {0}
        error = (run.rank(roots[0]["rank"]).stderr).read_text()
        assert "RestartAbort: no further restart within the processes: iteration 3 with max_iterations=3" in error
        run.check_nothing_left(within=10)
