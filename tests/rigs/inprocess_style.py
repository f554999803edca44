"""A program as users of NVIDIA's extension 0.2 write them; only the package's name is put in. Run as plain processes.

::

    RING_PACKAGE=… RANK=… WORLD_SIZE=… MASTER_ADDR=… MASTER_PORT=… python tests/rigs/inprocess_style.py OUT
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from datetime import timedelta
from typing import Any, Optional

import torch
import torch.distributed

inprocess: Any = importlib.import_module(os.environ.get("RING_PACKAGE", "hpc_elastic.inprocess"))

CALLS: list[str] = []


class Note(inprocess.initialize.Initialize):  # type: ignore[misc, name-defined]
    def __call__(self, state: Any) -> Any:
        CALLS.append(f"initialize {state.iteration} {state.rank}/{state.world_size}")
        return state


def cleanup(word: str, *, more: str) -> None:
    CALLS.append(f"{word} {more}")


def check_health(counter: Any) -> Any:
    return inprocess.Compose(counter, inprocess.health_check.CudaHealthCheck(timedelta(seconds=30)))


def train(base: int, call_wrapper: Any = None) -> dict[str, Any]:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = torch.distributed.TCPStore(
        host_name=os.environ["MASTER_ADDR"],
        port=int(os.environ["MASTER_PORT"]) + 1 + call_wrapper.iteration,
        world_size=world_size,
        is_master=rank == 0,
        multi_tenant=True,
        wait_for_workers=True,
        use_libuv=True,
    )
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    total = torch.tensor([float(base + rank)])
    torch.distributed.all_reduce(total)
    for step in range(20):
        call_wrapper.ping()
        with call_wrapper.atomic():
            CALLS.append("saved") if step == 10 else None
        if call_wrapper.iteration == 0 and rank == 1 and step == 15:
            raise RuntimeError("example fault")
        time.sleep(0.01)
        if call_wrapper.iteration == 0 and step == 19:
            while True:
                time.sleep(0.01)
    torch.distributed.destroy_process_group()
    return {"total": total.item(), "iteration": call_wrapper.iteration, "rank": rank}


train.__annotations__["call_wrapper"] = Optional[inprocess.CallWrapper]  # noqa: UP045 - as they write it


def main() -> None:
    keys = inprocess.rank_assignment.FilterGroupedByKey(
        key_or_fn=lambda rank, world_size: str(rank // 2),
        condition=lambda count: count == 2,
        timeout=timedelta(seconds=60),
    )
    wrapped = inprocess.Wrapper(
        store_kwargs={"timeout": timedelta(seconds=60), "port": int(os.environ["MASTER_PORT"])},
        initialize=inprocess.Compose(Note(), inprocess.initialize.RetryController(max_iterations=4, min_world_size=2)),
        abort=inprocess.abort.AbortTorchDistributed(),
        finalize=inprocess.finalize.ThreadedFinalize(timedelta(seconds=10), cleanup, ("cleaned",), {"more": "up"}),
        health_check=check_health(inprocess.health_check.FaultCounter(max_rank_faults=2)),
        rank_assignment=inprocess.Compose(inprocess.rank_assignment.ShiftRanks(), keys),
        rank_filter=inprocess.Compose(
            inprocess.rank_filter.WorldSizeDivisibleBy(2), inprocess.rank_filter.MaxActiveWorldSize(4)
        ),
        monitor_thread_interval=timedelta(seconds=0.1),
        monitor_process_interval=timedelta(seconds=0.1),
        progress_watchdog_interval=timedelta(seconds=0.1),
        soft_timeout=timedelta(seconds=60),
        hard_timeout=timedelta(seconds=90),
        heartbeat_timeout=timedelta(seconds=60),
        barrier_timeout=timedelta(seconds=120),
        completion_timeout=timedelta(seconds=120),
        last_call_wait=timedelta(seconds=0.1),
        monitor_process_logfile="/dev/null",
    )(train)
    assert wrapped.__name__ == "train"
    result = wrapped(10)
    with open(sys.argv[1], "w") as out:
        json.dump({"result": result, "calls": CALLS}, out)


if __name__ == "__main__":
    main()
