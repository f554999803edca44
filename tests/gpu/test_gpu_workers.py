"""Workers and their GPUs: how many are started, what they see, what NVML says of the node."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_elastic.agent.health import gpus_from_json, judge_gpus
from hpc_elastic.base.host_facts import module_command
from hpc_elastic.run.paths import ExitCode
from tests.rigs.gpu import RUN_SECONDS, GpuRun, Machine

pytestmark = pytest.mark.gpu

_COMPUTE = """
import torch
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
total = torch.ones(1000, device=device).sum().item()
tell("here", visible=os.environ.get("CUDA_VISIBLE_DEVICES"), world=WORLD, count=torch.cuda.device_count(), total=total)
"""


@pytest.mark.parametrize(("asked", "visible"), [("gpu", "as it is"), ("auto", "index"), ("gpu", "uuid")])
def test_a_worker_for_each_visible_gpu(
    tmp_path: Path, machine: Machine, seen: Callable[[str, str], None], asked: str, visible: str
) -> None:
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "index":
        given = (given or "0").split(",")[0]
    elif visible == "uuid":
        if not machine.uuid:
            pytest.skip(f"torch {machine.torch} does not say the GPU's UUID")
        given = machine.uuid
    workers = machine.count if visible == "as it is" else 1
    environ = {} if given is None else {"CUDA_VISIBLE_DEVICES": given}
    with GpuRun(tmp_path, _COMPUTE, nodes=1, nproc=asked, environ=environ) as run:
        assert run.finish(within=RUN_SECONDS) == ExitCode.OK, run.explain()
        here = run.moments("here")
    assert [value["world"] for value in here] == [workers] * workers, run.explain()
    assert {value["visible"] for value in here} == {given}
    assert {value["total"] for value in here} == {1000.0}
    assert {value["count"] for value in here} == {workers}
    seen(
        f"--nproc-per-node {asked}, CUDA_VISIBLE_DEVICES {visible}",
        f"{len(here)} worker(s), each sees {workers} GPU(s)",
    )


def test_what_nvml_says_of_this_node(
    seen: Callable[[str, str], None], keep: Callable[[str, str | Path], None], machine: Machine
) -> None:
    began = time.monotonic()
    argv = module_command("hpc_elastic.agent.health", "print_gpus")
    done = subprocess.run(argv, capture_output=True, text=True, timeout=90)
    took = time.monotonic() - began
    keep("nvml.json", done.stdout)
    facts = gpus_from_json(done.stdout)
    assert facts.is_there, done
    assert not facts.error, done
    assert len(facts.devices) >= machine.count, done
    assert facts.driver, done
    assert all(device.name for device in facts.devices if not device.error), done
    assert all(device.uuid.startswith(("GPU-", "MIG-")) or device.error for device in facts.devices), done
    finding = judge_gpus(facts, given=None, visible=os.environ.get("CUDA_VISIBLE_DEVICES"), least_errors=1)
    figures = json.loads(done.stdout)["devices"][0]
    seen("NVML's health facts", f"{took:.1f} s; {finding.reason or 'fit'}; {figures}")
