"""``--numa-binding``: the affinity of real workers, and the CPUs that torch's own binding would give them."""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.numa import binding as torchs

from hpc_elastic.agent.numa_binding import bind_workers, read_machine
from hpc_elastic.base.text import ranges
from hpc_elastic.run.option_values import NumaBinding
from hpc_elastic.run.paths import ExitCode
from tests.rigs.container_image import interpreters_folders, make_image, require_charliecloud
from tests.rigs.local_run import LocalRun
from tests.rigs.sys_trees import Shape, SysTree

_LOOKS = """
import subprocess, threading
others = []
thread = threading.Thread(target=lambda: others.append(sorted(os.sched_getaffinity(0))))
thread.start(); thread.join()
child = subprocess.run([sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"], capture_output=True)
tell("saw", cpus=sorted(os.sched_getaffinity(0)), thread=others[0], child=eval(child.stdout))
if ROUND == 0 and RANK == 0:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["spawn", "forkserver", "container"])
def test_each_worker_has_its_own_cpus_after_a_restart_too(tmp_path: Path, how: str) -> None:
    options = ["--numa-binding", "exclusive", "--start-method", "forkserver" if how == "forkserver" else "spawn"]
    if how == "forkserver":
        options += ["--preload", "json"]
    if how == "container":
        require_charliecloud()
        image = make_image(tmp_path / "image", mounted_at=interpreters_folders())
        options += ["--container-image", f"charliecloud:{image}", "--python", sys.executable]
        options += ["--container-mounts", ",".join(interpreters_folders())]
    machine = read_machine({}, os.sched_getaffinity(0))
    workers = min(2, len(set(machine.cores.values())))
    expected = [sorted(one.cpus) for one in bind_workers(NumaBinding.EXCLUSIVE, machine, workers)]
    with LocalRun(tmp_path, _LOOKS, nodes=1, nproc=workers, options=options) as run:
        assert run.finish() == ExitCode.OK
        for round_index in (0, 1):
            saw = {one["rank"]: one for one in run.moments("saw", round_index=round_index)}
            for rank, one in saw.items():
                assert one["cpus"] == one["thread"] == one["child"] == expected[rank]
        assert len(saw) == workers
        assert f"--numa-binding exclusive: local rank 0: CPUs {ranges(expected[0])} (NUMA node" in run.log()
        (event, *_) = run.events("workers_started")
        assert event["cpus"] == [ranges(cpus) for cpus in expected]
        assert event.get("started_fresh", "") == ""


def test_what_can_not_be_had_is_the_runs_refusal_and_no_nodes_fault(tmp_path: Path) -> None:
    cores = len(set(read_machine({}, os.sched_getaffinity(0)).cores.values()))
    options = ["--numa-binding", "exclusive"]
    with LocalRun(tmp_path, 'tell("never")', nodes=1, nproc=cores + 1, options=options) as run:
        assert run.finish() == ExitCode.NOT_RETRYABLE
        assert "--numa-binding exclusive: this job has" in run.log()
        assert not run.moments("never")


@pytest.mark.parametrize(
    "shape",
    [
        Shape(sockets=2, cores_per_complex=4, threads=2, gpus=(0, 0, 1, 1)),
        Shape(sockets=2, nodes_per_socket=2, complexes_per_node=2, cores_per_complex=2, gpus=(1, 0, 3, 2)),
        Shape(complexes_per_node=3, cores_per_complex=3, threads=2, gpus=(0, 0, 0, 0)),
        Shape(complexes_per_node=2, cores_per_complex=2, gpus=(-1,)),
    ],
    ids=["smt", "four-nodes", "uneven", "one-node"],
)
@pytest.mark.parametrize("has_all", [True, False])
@pytest.mark.parametrize("binding", NumaBinding)
def test_the_cpus_are_those_that_torchrun_would_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: Shape, binding: NumaBinding, has_all: bool
) -> None:
    tree = SysTree(tmp_path, shape)
    allowed = shape.cpus if has_all else shape.cpus - {1, max(shape.cpus)}
    machine = read_machine({}, allowed, **tree.paths)
    ours = [set(one.cpus) for one in bind_workers(binding, machine, len(shape.gpus))]
    _torch_reads(tree, allowed, [gpu.bus_id for gpu in machine.gpus], monkeypatch)
    options = torchs.NumaOptions(affinity_mode=torchs.AffinityMode(binding.value))
    for index, cpus in enumerate(ours):
        assert cpus == torchs._get_logical_cpus_to_bind_to(gpu_index=index, numa_options=options)


def _torch_reads(tree: SysTree, allowed: frozenset[int], gpus: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Show torch's binding the tree in place of this machine."""

    def inside(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda path, *args: function(f"{tree.root}{path}", *args)

    def properties(index: int) -> SimpleNamespace:
        domain, bus, rest = gpus[index].split(":")
        return SimpleNamespace(
            pci_domain_id=int(domain, 16), pci_bus_id=int(bus, 16), pci_device_id=int(rest.partition(".")[0], 16)
        )

    monkeypatch.setattr(torchs, "open", inside(builtins.open), raising=False)
    monkeypatch.setattr(torchs, "_get_gpu_count", lambda: len(gpus))
    monkeypatch.setattr(torchs, "_get_allowed_cpu_indices_for_current_thread", lambda: set(allowed))
    monkeypatch.setattr(torchs, "torch", SimpleNamespace(cuda=SimpleNamespace(get_device_properties=properties)))
    fake_os = SimpleNamespace(listdir=inside(os.listdir), path=os.path)
    monkeypatch.setattr(torchs, "os", fake_os)
