"""What the worker scripts of tests do with torch, on a GPU or without one.

torch is imported where it is used: pytest, which takes the scripts from here, must not start torch's threads.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SHARING: dict[str, dict[str, str]] = {
    "as it is": {},
    "NCCL_MULTI_RANK_GPU_ENABLE": {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"},
    "NCCL_HOSTID": {"NCCL_HOSTID": "host-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1",
                    "NCCL_NVLS_ENABLE": "0", "NCCL_MNNVL_ENABLE": "0"},
}  # fmt: skip
"""Ways to have several ranks of NCCL on one GPU → the variables of each rank. NCCL refuses it since 2.5; since 2.30 a
variable allows it; before, two ranks that call themselves two hosts are not compared, and use sockets."""

ALL_REDUCE = """
from tests.rigs.torch_ranks import join
import torch
import torch.distributed as dist

device = join(*sys.argv[1:])
value = torch.tensor([2.0**RANK], device=device)
dist.all_reduce(value)
tell("here", total=value.item(), group=dist.get_world_size(), restarts=ROUND)
for step in range(100000):
    stop = torch.tensor([float(is_said("end"))], device=device)
    dist.all_reduce(stop, op=dist.ReduceOp.MAX)
    if stop.item():
        break
    time.sleep(0.01)
dist.destroy_process_group()
"""
"""For `LocalRun`, with `join`'s arguments: the ranks sit in a collective when one dies, as they would in training."""


def share(way: str, rank: int, environ: Any = os.environ) -> None:
    """Set what a rank needs to share its GPU with others, before its first group."""
    variables: Mapping[str, str] = SHARING[way]
    environ.update({name: value.format(rank=rank) for name, value in variables.items()})


def join(backend: str, device: str, way: str = "as it is", seconds: float = 60.0) -> torch.device:
    """Make the default group of this worker's ranks.

    Args:
        backend: gloo or nccl.
        device: cpu, or cuda for one of the GPUs that this worker sees.
        way: Of `SHARING`.
        seconds: The group's timeout.
    """
    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    share(way, rank)
    found = torch.device(device)
    if device == "cuda":
        found = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(found)
    dist.init_process_group(backend, timeout=timedelta(seconds=seconds))
    return found


def queue_what_never_ends() -> None:
    """Give the current GPU a kernel, or kernels, that take hours; returns at once or never."""
    import torch

    if hasattr(torch.cuda, "_sleep"):
        torch.cuda._sleep(1 << 62)
        return
    value = torch.ones(8192, 8192, device="cuda")
    for _ in range(10_000_000):  # the queue of a stream is full long before
        value = value @ value


def touch_foreign_memory(*, after: float = 0.0) -> None:
    """Queue a kernel that writes a TB behind its memory. No private function of torch's is needed for that.

    Args:
        after: About so many seconds from now, where this torch can have a GPU sleep.
    """
    import torch

    mine = torch.zeros(1024, device="cuda").fill_(1.0)

    class Endless:
        __cuda_array_interface__ = {  # noqa: RUF012 - read once
            "data": (mine.data_ptr(), False), "shape": (1 << 40,), "typestr": "<f4", "strides": None, "version": 3,
        }  # fmt: skip

    foreign = torch.as_tensor(Endless(), device="cuda")[1 << 38]
    torch.cuda.synchronize()
    if after and hasattr(torch.cuda, "_sleep"):
        torch.cuda._sleep(int(after * 1e9))
    foreign.fill_(1.0)
