"""``--numa-binding``: which CPUs a worker gets, over trees of /sys of several machines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hpc_elastic.agent.numa_binding import Machine, bind_workers, describe_binding, read_machine
from hpc_elastic.base.text import ranges
from hpc_elastic.errors import UsageError
from hpc_elastic.run.option_values import NumaBinding
from tests.rigs.sys_trees import UUID, VIRTUAL_MACHINE, Shape, SysTree, write_tree

XEON = Shape(sockets=2, cores_per_complex=4, threads=2, gpus=(0, 0, 1, 1))
"""CPUs 0-3 and 8-11 on node 0, 4-7 and 12-15 on node 1; 8 to 15 are the second threads."""
EPYC = Shape(sockets=2, nodes_per_socket=2, complexes_per_node=2, cores_per_complex=2, gpus=(1, 0, 3, 2))
"""Four NUMA nodes of four cores, two core complexes in each; the GPUs are not in the nodes' order."""
ONE_NODE = Shape(complexes_per_node=4, cores_per_complex=2, gpus=(-1, -1))


def machine(
    folder: Path, shape: Shape, *, env: Mapping[str, str] | None = None, allowed: frozenset[int] | None = None
) -> Machine:
    return read_machine(env or {}, shape.cpus if allowed is None else allowed, **SysTree(folder, shape).paths)


def bound(binding: NumaBinding, found: Machine, workers: int) -> list[str]:
    return [ranges(sorted(one.cpus)) for one in bind_workers(binding, found, workers)]


NO_GPUS = Shape(sockets=2, cores_per_complex=4)
NODE, SOCKET, EXCLUSIVE, COMPLEX = NumaBinding.NODE, NumaBinding.SOCKET, NumaBinding.EXCLUSIVE, NumaBinding.CORE_COMPLEX


@pytest.mark.parametrize(
    ("shape", "binding", "cpus"),
    [
        (XEON, NODE, ["0-3,8-11", "0-3,8-11", "4-7,12-15", "4-7,12-15"]),
        (XEON, SOCKET, ["0-3,8-11", "0-3,8-11", "4-7,12-15", "4-7,12-15"]),
        (XEON, EXCLUSIVE, ["0-1,8-9", "2-3,10-11", "4-5,12-13", "6-7,14-15"]),
        (XEON, COMPLEX, ["0-3,8-11", "0-3,8-11", "4-7,12-15", "4-7,12-15"]),
        (EPYC, NODE, ["4-7", "0-3", "12-15", "8-11"]),
        (EPYC, SOCKET, ["0-7", "0-7", "8-15", "8-15"]),
        (EPYC, EXCLUSIVE, ["4-7", "0-3", "12-15", "8-11"]),
        (EPYC, COMPLEX, ["4-5", "0-1", "12-13", "8-9"]),
        (ONE_NODE, NODE, ["0-7", "0-7"]),
        (ONE_NODE, EXCLUSIVE, ["0-3", "4-7"]),
        (ONE_NODE, COMPLEX, ["0-1", "2-3"]),
        # Cores that are left over go to the first, and stay whole.
        (Shape(cores_per_complex=7, threads=2, gpus=(0, 0, 0)), EXCLUSIVE, ["0-2,7-9", "3-4,10-11", "5-6,12-13"]),
        # A GPU that no worker uses has its share; workers that share one have their own.
        (XEON, EXCLUSIVE, ["0-1,8-9"]),
        (XEON, EXCLUSIVE, ["0,8", "1,9", "4,12", "5,13", "2,10", "3,11", "6,14", "7,15"]),
        # Without GPUs the nodes are divided among the local ranks.
        (NO_GPUS, NODE, ["0-3", "0-3", "4-7", "4-7"]),
        (NO_GPUS, EXCLUSIVE, ["0-1", "2-3", "4-5", "6-7"]),
        (NO_GPUS, NODE, ["0-3", "0-3", "4-7"]),
        (NO_GPUS, NODE, ["0-3"]),
        # Nodes of memory alone hold no worker.
        (Shape(sockets=2, cpuless=2), SOCKET, ["0-3", "4-7"]),
        (Shape(sockets=1, cpuless=1, gpus=(1,)), NODE, ["0-3"]),
    ],
)
def test_a_worker_is_near_its_gpu(tmp_path: Path, shape: Shape, binding: NumaBinding, cpus: list[str]) -> None:
    assert bound(binding, machine(tmp_path, shape), len(cpus)) == cpus


@pytest.mark.parametrize(
    ("visible", "nodes"),
    [
        (None, [0, 0, 1, 1]),
        ("2,0", [1, 0]),
        (f"{UUID.format(3)},{UUID.format(0)[:12]}", [1, 0]),  # the second is ambiguous: CUDA takes the first
        ("3,9,0", [1]),
        ("", []),
        ("-1", []),
    ],
)
def test_the_gpus_are_those_that_the_worker_sees(tmp_path: Path, visible: str | None, nodes: list[int]) -> None:
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert [gpu.node for gpu in machine(tmp_path, XEON, env=env).gpus] == nodes


def test_a_gpu_that_the_job_may_not_open_is_not_counted(tmp_path: Path) -> None:
    """As CUDA does: what Slurm's cgroup leaves is numbered from 0."""
    tree = SysTree(tmp_path, XEON)
    tree.hide_gpu(0)
    tree.hide_gpu(1)
    found = read_machine({"CUDA_VISIBLE_DEVICES": "0,1"}, XEON.cpus, **tree.paths)
    assert [gpu.bus_id for gpu in found.gpus] == ["0000:30:00.0", "0000:40:00.0"]


def test_a_part_of_a_gpu_is_where_all_gpus_are_or_goes_by_local_rank(tmp_path: Path) -> None:
    env = {"CUDA_VISIBLE_DEVICES": "MIG-1,MIG-2"}
    one_node = Shape(sockets=2, gpus=(1, 1))
    assert bound(NumaBinding.NODE, machine(tmp_path / "one", one_node, env=env), 2) == ["4-7", "4-7"]
    assert bound(NumaBinding.NODE, machine(tmp_path / "two", XEON, env=env), 2) == ["0-3,8-11", "4-7,12-15"]


def test_gpus_of_no_known_node_go_by_local_rank(tmp_path: Path) -> None:
    found = machine(tmp_path, Shape(sockets=2, gpus=(-1, -1)))
    assert bound(NumaBinding.NODE, found, 2) == ["0-3", "4-7"]
    assert "that of GPU 0000:10:00.0 is not known" in bind_workers(NumaBinding.NODE, found, 2)[0].why


@pytest.mark.parametrize(
    ("allowed", "binding", "cpus"),
    [
        ({0, 1, 8, 4, 5}, NumaBinding.NODE, ["0-1,8", "0-1,8", "4-5", "4-5"]),
        ({0, 1, 8, 4, 5}, NumaBinding.EXCLUSIVE, ["0,8", "1", "4", "5"]),
        ({4, 5, 6, 7}, NumaBinding.NODE, ["4-7"] * 4),
        ({4, 5, 6, 7}, NumaBinding.EXCLUSIVE, ["4", "5", "6", "7"]),
        ({4, 5, 6, 7}, NumaBinding.SOCKET, ["4-7"] * 4),
    ],
    ids=["cut", "cut-exclusive", "none-local", "none-local-exclusive", "none-local-socket"],
)
def test_a_worker_gets_no_cpu_that_the_job_has_not(
    tmp_path: Path, allowed: set[int], binding: NumaBinding, cpus: list[str]
) -> None:
    found = machine(tmp_path, XEON, allowed=frozenset(allowed))
    assert bound(binding, found, 4) == cpus


def test_the_nearest_node_is_taken_where_the_gpus_own_is_not_the_jobs(tmp_path: Path) -> None:
    found = machine(tmp_path, EPYC, allowed=frozenset(range(4)) | frozenset(range(8, 12)))
    first, *_, last = bind_workers(NumaBinding.NODE, found, 4)
    assert (ranges(sorted(first.cpus)), ranges(sorted(last.cpus))) == ("0-3", "8-11")
    assert first.why == "NUMA node 0: GPU 0000:10:00.0 is on node 1, of which this job has no CPU"


def test_too_few_cores_for_own_ones_are_refused_with_the_way_out(tmp_path: Path) -> None:
    found = machine(tmp_path, XEON, allowed=frozenset({0, 8, 4, 5}))
    with pytest.raises(UsageError, match=r"has 1 physical core of NUMA node 0 for 2 workers; ask for more CPUs"):
        bind_workers(NumaBinding.EXCLUSIVE, found, 4)


def test_a_captured_machine(tmp_path: Path) -> None:
    write_tree(tmp_path / "sys/devices/system", VIRTUAL_MACHINE)
    found = read_machine({}, frozenset({0, 1}), system=tmp_path / "sys", driver=tmp_path, devices=tmp_path)
    assert bound(NumaBinding.EXCLUSIVE, found, 2) == ["0", "1"]
    for binding in (NumaBinding.NODE, NumaBinding.SOCKET, NumaBinding.CORE_COMPLEX):
        assert bound(binding, found, 2) == ["0-1", "0-1"]


def test_a_kernel_that_shows_nothing_is_one_node(tmp_path: Path) -> None:
    nothing: dict[str, Any] = {"system": tmp_path, "driver": tmp_path / "no", "devices": tmp_path}
    found = read_machine({}, frozenset({3, 4}), **nothing)
    assert bound(NumaBinding.NODE, found, 1) == ["3-4"]
    assert bound(NumaBinding.CORE_COMPLEX, found, 2) == ["3-4", "3-4"]
    assert bound(NumaBinding.EXCLUSIVE, found, 2) == ["3", "4"]


def test_one_line_says_what_each_worker_got(tmp_path: Path) -> None:
    found = bind_workers(NumaBinding.EXCLUSIVE, machine(tmp_path, XEON), 2)
    assert describe_binding(NumaBinding.EXCLUSIVE, found) == (
        "--numa-binding exclusive: local rank 0: CPUs 0-1,8-9 (NUMA node 0 of GPU 0000:10:00.0); "
        "local rank 1: CPUs 2-3,10-11 (NUMA node 0 of GPU 0000:20:00.0)"
    )
