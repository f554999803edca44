"""NCCL between ranks and below them: a rank that does not come, the flight recorder's pipe, RAS."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_elastic.base.outcome import ExitCode
from tests.rigs.gpu import RUN_SECONDS, GpuRun, Machine, ask_ras
from tests.rigs.inprocess_ranks import free_ports

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

_ASKED = {
    "status.txt": ("STATUS",),
    "verbose.txt": ("VERBOSE STATUS",),
    "verbose.json": ("SET FORMAT json", "VERBOSE STATUS"),
}


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


def test_ras_answers(
    tmp_path: Path, machine: Machine, seen: Callable[[str, str], None], keep: Callable[[str, str | Path], None]
) -> None:
    if tuple(int(part) for part in machine.nccl.split(".")[:2] if part.isdigit()) < (2, 24):
        pytest.skip(f"NCCL {machine.nccl} has no RAS; 2.24 has")
    address = ("127.0.0.1", free_ports())
    with GpuRun(tmp_path, _IN_A_GROUP, nodes=1, environ={"NCCL_RAS_ADDR": f"{address[0]}:{address[1]}"}) as run:
        run.until(lambda: run.moments("here"), "group", within=RUN_SECONDS)
        answers = {}
        for name, commands in _ASKED.items():
            try:
                answers[name] = ask_ras(address, *commands)
            except OSError as error:
                answers[name] = f"{type(error).__name__}: {error}"
            keep(f"ras-{name}", answers[name])
        run.say("end")
        assert "NCCL" in answers["status.txt"], f"{answers}\n{run.explain()}"
        seen("NCCL RAS", "; ".join(f"{name}: {len(text)} characters" for name, text in answers.items()))
