"""Failures that need a GPU, each really happening to a worker, and what the report says of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.rigs.gpu import RUN_SECONDS, GpuRun

pytestmark = pytest.mark.gpu


@dataclass(frozen=True, kw_only=True)
class Case:
    script: str
    says: str
    failure_class: str = "root"
    category: str = "worker"
    retryable: bool = True
    nodes: int = 1
    environ: tuple[tuple[str, str], ...] = ()


_TORCH = "import torch\nfrom tests.rigs.torch_ranks import join, queue_what_never_ends, touch_foreign_memory\n"
_GROUP_OF_ONE = """
device = join("nccl", "cuda", seconds=8.0)
value = torch.ones(1, device=device)
torch.distributed.all_reduce(value)
torch.cuda.synchronize()
"""
_WAIT = "time.sleep(60)\ntell('nothing happened')\nos._exit(0)\n"

CASES = {
    "out of memory": Case(
        script="held = []\nwhile True:\n    held.append(torch.ones(1 << 28, device='cuda'))\n",
        says="the GPU's memory is full",
    ),
    "device-side assert": Case(
        script="values = torch.zeros(4, device='cuda')\nprint(values[torch.tensor([7], device='cuda')].sum().item())\n",
        says="a check in a GPU kernel failed",
    ),
    "illegal memory access": Case(
        script="touch_foreign_memory()\ntorch.cuda.synchronize()\n", says="touched memory that is not its own"
    ),
    # The main thread waits for nothing: NCCL's watchdog ends the process, with the sentence it also has for lost peers.
    "illegal memory access, in a group": Case(
        script=f"{_GROUP_OF_ONE}touch_foreign_memory(after=2.0)\ntorch.distributed.all_reduce(value)\n{_WAIT}",
        says="touched memory that is not its own",
    ),
    "no such GPU": Case(
        script="torch.zeros(1, device=f'cuda:{torch.cuda.device_count()}')\n",
        says="a GPU that is not there",
        category="input",
    ),
    "no GPU visible": Case(
        script="torch.zeros(1, device='cuda')\n",
        says="no GPU can be seen",
        category="input",
        environ=(("CUDA_VISIBLE_DEVICES", ""),),
    ),
    "two ranks on one GPU": Case(
        script="device = join('nccl', 'cuda')\ntorch.cuda.set_device(0)\nvalue = torch.ones(1, device='cuda:0')\n"
        "torch.distributed.all_reduce(value)\nprint('the sum is', value.item())\ntell('summed')\n",
        says="two ranks were given the same GPU",
        category="input",
        retryable=False,
        nodes=2,
    ),
    # The collective waits behind a kernel that does not end.
    "a collective that times out": Case(
        script=f"{_GROUP_OF_ONE}queue_what_never_ends()\ntorch.distributed.all_reduce(value)\n{_WAIT}",
        says="a collective waited for a peer until its timeout",
        failure_class="symptom",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_the_report_says_of(
    tmp_path: Path, seen: Callable[[str, str], None], keep: Callable[[str, str | Path], None], name: str
) -> None:
    case = CASES[name]
    began = time.monotonic()
    options = ["--max-restarts", "0"]
    with GpuRun(tmp_path, _TORCH + case.script, nodes=case.nodes, options=options, environ=dict(case.environ)) as run:
        run.finish(within=RUN_SECONDS)
        file = name.replace(" ", "-").replace(",", "")
        for rank in range(case.nodes):
            keep(f"failure-{file}-rank{rank}.txt", run.rank(rank).stderr)
        if run.moments("summed"):
            pytest.skip("this NCCL lets ranks share a GPU as it is")
        dumps = run.flight_recorder_dumps()
        for dump in dumps:
            keep(f"flight-recorder-{file}-{dump.name}", dump)
        cause = run.cause()
        assert case.says in cause["reason"], f"{cause}\n{run.explain()}"
        wanted = {"failure_class": case.failure_class, "category": case.category, "retryable": case.retryable}
        assert {key: cause[key] for key in wanted} == wanted, f"{cause}\n{run.explain()}"
    dumped = f"; flight recorder: {', '.join(f'{dump.stat().st_size} bytes' for dump in dumps)}" if dumps else ""
    verdict = f"{cause['failure_class']}, {cause['category']}: {cause['reason']}"
    seen(f"failure: {name}", f"{verdict}; {time.monotonic() - began:.0f} s{dumped}")
