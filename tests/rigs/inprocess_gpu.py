"""What the ranks of `tests.rigs.inprocess_ranks` do on GPUs. No rank has used CUDA before it is forked."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hpc_elastic.inprocess as inprocess
from hpc_elastic.inprocess.tools.inject_fault import Fault, strike
from tests.rigs.inprocess_scenarios import Options, connect, store_of
from tests.rigs.torch_ranks import share


def spoilt_context(rank: int, folder: Path, options: Options) -> Any:
    """A device-side assert in the function: CUDA can't be used in this process any more."""

    @inprocess.Wrapper(health_check=inprocess.health_check.CudaHealthCheck(), **store_of(folder, options))
    def function(call: inprocess.CallWrapper) -> int:
        torch.zeros(1, device="cuda")
        if call.iteration == 0:
            strike(Fault.GPU)
        return call.iteration

    return function()


def busy_gpu(rank: int, folder: Path, options: Options) -> Any:
    """A kernel that does not end, and then an exception."""
    check = inprocess.health_check.CudaHealthCheck(timeout=timedelta(seconds=2))

    @inprocess.Wrapper(health_check=check, **store_of(folder, options))
    def function(call: inprocess.CallWrapper) -> int:
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
        if call.iteration == 0:
            strike(Fault.GPU_SLEEP)
            raise ValueError("planted")
        return call.iteration

    return function()


def counted_faults(rank: int, folder: Path, options: Options) -> Any:
    """The function fails each time, and its device is healthy: one fault is allowed."""
    check = inprocess.Compose(
        inprocess.health_check.CudaHealthCheck(), inprocess.health_check.FaultCounter(max_rank_faults=1)
    )

    @inprocess.Wrapper(health_check=check, **store_of(folder, options))
    def function(call: inprocess.CallWrapper) -> None:
        torch.ones(1, device=options["device"]).item()
        raise ValueError("planted")

    function()


def blocked_nccl(rank: int, folder: Path, options: Options) -> Any:
    """The last rank raises while the others are in an all-reduce on their GPUs, which they may share in a way of
    `torch_ranks.SHARING`. Iteration, ranks, seconds."""
    began: list[float] = []

    @inprocess.Wrapper(**store_of(folder, options))
    def function(call: inprocess.CallWrapper) -> list[Any]:
        own, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        share(options["way"], own)
        torch.cuda.set_device(own % torch.cuda.device_count())
        store = dist.PrefixStore(f"{folder.name}/{call.iteration}", connect())
        dist.init_process_group("nccl", store=store, rank=own, world_size=world)
        value = torch.ones(1, device="cuda")
        dist.all_reduce(value)
        together = value.item()
        if call.iteration == 0:
            began.append(time.monotonic())
            if own == world - 1:
                raise ValueError("planted")
            dist.all_reduce(value)
            value.item()
        dist.destroy_process_group()
        return [call.iteration, together, time.monotonic() - began[0]]

    return function()
