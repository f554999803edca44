"""NCCL between ranks and below them: a rank that does not come, the flight recorder's pipe, RAS."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_elastic.agent.nccl_watch import ask_ras, nccl_version, parse_address
from hpc_elastic.failures.peers import Launches, parse_json
from hpc_elastic.run.paths import ExitCode
from tests.rigs.gpu import RUN_SECONDS, GpuRun, Machine

pytestmark = pytest.mark.gpu

_ONE_DOES_NOT_COME = """
import torch, torch.distributed as dist
from tests.rigs.torch_ranks import join

tell("here")
others_in_round()
device = join("nccl", "cuda", sys.argv[1], seconds=15.0)
value = torch.ones(1, device=device)
dist.all_reduce(value)
torch.cuda.synchronize()
if RANK == 0:
    dist.all_reduce(value)
    torch.cuda.synchronize()
wait_for("never")
"""

_IN_A_GROUP = """
import torch, torch.distributed as dist
from tests.rigs.torch_ranks import join

device = join("nccl", "cuda")
value = torch.ones(1, device=device)
for _ in range(3):
    dist.all_reduce(value)
torch.cuda.synchronize()
tell("here")
wait_for("end")
dist.destroy_process_group()
"""

_IN_A_GROUP_SHOWN = 'tell("ras", address=os.environ["NCCL_RAS_ADDR"], pid=os.getpid())\n'


def test_two_ranks_on_one_gpu(sharing: tuple[str, str]) -> None:
    """The row of the table is the answer; what needs it is skipped where NCCL refuses."""
    assert sharing[1]


def test_a_rank_that_does_not_come_is_a_timeout(
    tmp_path: Path, way: str, seen: Callable[[str, str], None], keep: Callable[[str, str | Path], None]
) -> None:
    with GpuRun(tmp_path, _ONE_DOES_NOT_COME, nodes=2, arguments=(way,), options=["--max-restarts", "0"]) as run:
        cause = run.cause()
        for rank in range(2):
            keep(f"nccl-timeout-rank{rank}.txt", run.rank(rank).stderr)
        for dump in run.flight_recorder_dumps():
            keep(f"flight-recorder-two-ranks-{dump.name}", dump)
        assert cause["failure_class"] == "symptom", f"{cause}\n{run.explain()}"
        assert "timeout" in cause["reason"], f"{cause}\n{run.explain()}"
        seen("NCCL's watchdog, a rank did not come", f"rank {cause['global_rank']}: {cause['reason']}")


def test_the_flight_recorder_dumps_when_its_pipe_is_written_to(
    tmp_path: Path, machine: Machine, seen: Callable[[str, str], None], keep: Callable[[str, str | Path], None]
) -> None:
    with GpuRun(tmp_path, _IN_A_GROUP, nodes=1) as run:
        run.until(lambda: run.moments("here"), "group", within=RUN_SECONDS)
        pipe = next(iter(run.recorder.glob("pipe-*")), None)
        if pipe is None:
            pytest.skip(f"torch {machine.torch} makes no pipe")
        asked = time.monotonic()
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        os.write(descriptor, b"1\n")
        os.close(descriptor)
        run.until(lambda: [dump for dump in run.flight_recorder_dumps() if dump.stat().st_size], "dump", within=60.0)
        took = time.monotonic() - asked
        run.say("end")
        assert run.finish(within=RUN_SECONDS) == ExitCode.OK, run.explain()
        (dump,) = run.flight_recorder_dumps()
        keep(f"flight-recorder-pipe-{dump.name}", dump)
        seen("the flight recorder's pipe", f"{dump.stat().st_size} bytes in {dump.name}, {took:.1f} s later")


_STOPS = """
import torch, torch.distributed as dist
from tests.rigs.torch_ranks import join

device = join("nccl", "cuda", sys.argv[1], seconds=120.0)
value = torch.ones(1, device=device)
others_in_round()
tell("here", address=os.environ["NCCL_RAS_ADDR"])
began = time.monotonic()
while not is_said("end"):  # it never rests, and rank 1 is late for good after 4 s
    if time.monotonic() - began < 4 or (RANK < BEHIND and LEFT):
        dist.all_reduce(value)
        LEFT -= time.monotonic() - began >= 4
        time.sleep(0.05)
os._exit(0)
"""


def _needs_ras(machine: Machine) -> None:
    if tuple(int(part) for part in machine.nccl.split(".")[:3] if part.isdigit()) < (2, 28, 7):
        pytest.skip(f"NCCL {machine.nccl} is asked nothing: only 2.28.7 and newer")


def test_ras_answers(
    tmp_path: Path, machine: Machine, seen: Callable[[str, str], None], keep: Callable[[str, str | Path], None]
) -> None:
    """The agents' own client, at the address that the agent chose."""
    _needs_ras(machine)
    with GpuRun(tmp_path, f"{_IN_A_GROUP_SHOWN}{_IN_A_GROUP}", nodes=1) as run:
        run.until(lambda: run.moments("here"), "group", within=RUN_SECONDS)
        address = parse_address(run.moments("ras")[0]["address"])
        assert address is not None
        found = ask_ras(address, world_size=1, why_not_ours=lambda _: "")
        keep("ras-verbose.json", found)
        loaded = nccl_version(run.moments("ras")[0]["pid"])
        run.say("end")
        seen("the NCCL that a worker has loaded, by its files", str(loaded))
        assert loaded is None or machine.nccl.startswith(".".join(map(str, loaded)))
        report = parse_json(found)
        assert machine.nccl in report.version, f"{found}\n{run.explain()}"
        (comm,) = report.communicators
        assert comm.levels["AllReduce"] == (Launches(3, 1, (0,)),), found
        assert not comm.trouble, found
        seen("NCCL RAS", f"{len(found)} characters of JSON")


def test_a_straggler_is_suspected_by_ras(
    tmp_path: Path, machine: Machine, way: str, seen: Callable[[str, str], None]
) -> None:
    _needs_ras(machine)
    options = ["--hangs", "observe:6"]
    script = f"BEHIND, LEFT = 1, 3\n{_STOPS}"
    with GpuRun(tmp_path, script, nodes=2, arguments=(way,), options=options) as run:
        run.until(lambda: run.events("hang_suspected"), "suspicion", within=RUN_SECONDS)
        run.say("end")
        (event,) = run.events("hang_suspected")
        assert event["source"] == "nccl", run.explain()
        assert event["ranks"] == [1], run.explain()
        seen("a straggler, by RAS", event["reason"])


def test_a_rest_of_all_is_no_suspicion_where_the_dumps_are_complete(
    tmp_path: Path, machine: Machine, seen: Callable[[str, str], None]
) -> None:
    _needs_ras(machine)
    script = f"BEHIND, LEFT = 0, 0\n{_STOPS}"
    with GpuRun(tmp_path, script, nodes=1, arguments=("as it is",), options=["--hangs", "observe:6"]) as run:
        run.until(lambda: run.moments("here"), "group", within=RUN_SECONDS)
        time.sleep(30.0)
        run.say("end")
        assert run.finish(within=RUN_SECONDS) == ExitCode.OK, run.explain()
        assert not run.events("hang_suspected"), run.explain()
        seen("a rest of all, by RAS", "no suspicion in 26 s, with observe:6")
