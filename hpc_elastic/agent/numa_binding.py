"""Divides a node's CPUs among its workers: torchrun's ``--numa-binding``, from /sys alone, without numactl and torch.

`read_machine` reads what the kernel says of the node's CPUs and GPUs, `bind_workers` decides. A worker belongs to the
GPU of its local rank; a node without GPUs, or whose GPUs are on no known NUMA node, divides its NUMA nodes among the
local ranks in their order. The meanings of the four values are those of torch 2.13 (torch.numa.binding). Where torch
ends the worker since the job has no CPU of the GPU's NUMA node, the nearest node of which it has one is taken.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

from msgspec import Struct

from hpc_elastic.base.host_facts import kernel_fields, kernel_text
from hpc_elastic.base.loop import FileExecutor
from hpc_elastic.base.text import plural, ranges
from hpc_elastic.errors import UsageError
from hpc_elastic.run.option_values import NumaBinding

logger = logging.getLogger(__name__)

READ_SECONDS = 5.0
"""How long the kernel may take: a GPU's driver in trouble can hold what reads its facts."""
_DATA_CACHES = ("Unified", "Data")


class Gpu(Struct, frozen=True, kw_only=True):
    bus_id: str = ""
    """Empty where the PCI address is not known, as for a part of a GPU (MIG)."""
    node: int | None = None


class Machine(Struct, frozen=True, kw_only=True):
    """The CPUs are those alone that this job may use; a CPU is one hardware thread."""

    nodes: Mapping[int, frozenset[int]]
    """NUMA node → its CPUs. Nodes without are left out."""
    distances: Mapping[int, Sequence[int]]
    """NUMA node → how far it is from the n-th node."""
    sockets: Mapping[int, int]
    cores: Mapping[int, int]
    """CPU → the first CPU of its physical core."""
    caches: Mapping[int, int]
    """CPU → the first CPU of those that share its last level of cache."""
    gpus: Sequence[Gpu] = ()
    """CUDA's order, which is that of their PCI addresses where all are of one model."""


class WorkerCpus(Struct, frozen=True, kw_only=True):
    cpus: frozenset[int]
    why: str


def bind_workers(binding: NumaBinding, machine: Machine, workers: int) -> list[WorkerCpus]:
    # As in torch each GPU has its share, also one that no worker uses; beyond that workers share GPUs, not CPUs.
    seats = max(workers, len(machine.gpus))
    homes = [_home(seat, seats, machine) for seat in range(seats)]
    found = []
    for seat in range(workers):
        node, why = homes[seat]
        neighbours = [other for other in range(seats) if homes[other][0] == node]
        place, count = neighbours.index(seat), len(neighbours)
        if binding is NumaBinding.SOCKET:
            socket = machine.sockets[min(machine.nodes[node])]
            nodes = (own for own in machine.nodes.values() if machine.sockets[min(own)] == socket)
            cpus = frozenset().union(*nodes)
        elif binding is NumaBinding.EXCLUSIVE:
            cpus = _share(machine, node, place, count)
        elif binding is NumaBinding.CORE_COMPLEX:
            # Each worker has another one while there are any, those with most CPUs first.
            groups = _grouped(machine.nodes[node], machine.caches).items()
            ordered = sorted(groups, key=lambda item: (-len(item[1]), item[0]))
            cpus = frozenset(ordered[place % len(ordered)][1])
        else:
            cpus = machine.nodes[node]
        found.append(WorkerCpus(cpus=cpus, why=why))
    return found


def _home(seat: int, seats: int, machine: Machine) -> tuple[int, str]:
    nodes = sorted(machine.nodes)
    by_rank = nodes[seat * len(nodes) // seats]
    if not machine.gpus:
        return by_rank, f"NUMA node {by_rank}"
    gpu = machine.gpus[seat % len(machine.gpus)]
    name = f"GPU {gpu.bus_id}" if gpu.bus_id else "a GPU"
    if gpu.node is None:
        return by_rank, f"NUMA node {by_rank} by local rank: that of {name} is not known"
    if gpu.node in machine.nodes:
        return gpu.node, f"NUMA node {gpu.node} of {name}"
    distances = machine.distances.get(gpu.node, ())
    near = min(nodes, key=lambda node: (distances[node] if node < len(distances) else 0, node))
    return near, f"NUMA node {near}: {name} is on node {gpu.node}, of which this job has no CPU"


def _share(machine: Machine, node: int, place: int, count: int) -> frozenset[int]:
    """The first workers have the cores that are left over."""
    cores = sorted(_grouped(machine.nodes[node], machine.cores).items())
    least, extra = divmod(len(cores), count)
    if least == 0:
        raise UsageError(
            f"--numa-binding exclusive: this job has {plural(len(cores), 'physical core')} of NUMA node {node} for "
            f"{count} workers; ask for more CPUs (--cpus-per-task), or use --numa-binding node"
        )
    start = place * least + min(place, extra)
    mine = cores[start : start + least + (place < extra)]
    return frozenset().union(*(cpus for _, cpus in mine))


def _grouped(cpus: Iterable[int], keys: Mapping[int, int]) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for cpu in cpus:
        found.setdefault(keys[cpu], set()).add(cpu)
    return found


def describe_binding(binding: NumaBinding, bound: Sequence[WorkerCpus]) -> str:
    each = (f"local rank {rank}: CPUs {ranges(sorted(one.cpus))} ({one.why})" for rank, one in enumerate(bound))
    return f"--numa-binding {binding.value}: {'; '.join(each)}"


def bind_agent(
    binding: NumaBinding, env: Mapping[str, str], workers: int, files: FileExecutor
) -> tuple[frozenset[int], ...]:
    try:
        machine = files.do(lambda: read_machine(env, os.sched_getaffinity(0)), within=READ_SECONDS)
    except (OSError, ValueError) as error:
        logger.warning("--numa-binding %s: nothing is bound, /sys can't be read: %s", binding.value, error)
        return ()
    bound = bind_workers(binding, machine, workers)
    logger.info("%s", describe_binding(binding, bound))
    return tuple(one.cpus for one in bound)


def read_machine(
    env: Mapping[str, str],
    allowed: AbstractSet[int],
    *,
    system: Path = Path("/sys"),
    driver: Path = Path("/proc/driver/nvidia/gpus"),
    devices: Path = Path("/dev"),
) -> Machine:
    """`allowed`: the CPUs that Slurm, a cpuset or taskset has left to this process."""
    cpus = system / "devices/system/cpu"
    nodes, distances = {}, {}
    for folder in (system / "devices/system/node").glob("node[0-9]*"):
        number = int(folder.name[4:])
        distances[number] = [int(word) for word in _text(folder / "distance").split()]
        if own := _cpu_list(_text(folder / "cpulist")) & allowed:
            nodes[number] = own
    if rest := allowed - frozenset().union(*nodes.values()):
        nodes[min(nodes, default=0)] = nodes.get(min(nodes, default=0), frozenset()) | rest  # a kernel without NUMA
    node_of = {cpu: node for node, own in nodes.items() for cpu in own}
    return Machine(
        nodes=nodes,
        distances=distances,
        sockets={cpu: int(_text(cpus / f"cpu{cpu}/topology/physical_package_id") or 0) for cpu in allowed},
        cores={cpu: min(_cpu_list(_text(cpus / f"cpu{cpu}/topology/thread_siblings_list")) | {cpu}) for cpu in allowed},
        caches={cpu: min(_last_cache(cpus / f"cpu{cpu}/cache") or nodes[node_of[cpu]]) for cpu in allowed},
        gpus=_visible(_gpus(system, driver, devices, has_one_node=len(distances) <= 1), env),
    )


def _last_cache(folder: Path) -> frozenset[int]:
    """Empty where the kernel shows no caches, as in some virtual machines."""
    found: tuple[int, frozenset[int]] = (0, frozenset())
    for index in folder.glob("index[0-9]*"):
        level = int(_text(index / "level") or 0)
        if level > found[0] and _text(index / "type") in _DATA_CACHES:
            found = level, _cpu_list(_text(index / "shared_cpu_list"))
    return found[1]


def _gpus(system: Path, driver: Path, devices: Path, *, has_one_node: bool) -> dict[str, Gpu]:
    """The GPUs that this job may open, by UUID, in the order of their PCI addresses."""
    found = {}
    for folder in sorted(driver.glob("*:*")):
        facts = kernel_fields(str(folder / "information"))
        if not os.access(devices / f"nvidia{facts.get('Device Minor', '')}", os.R_OK | os.W_OK):
            continue
        text = _text(system / "bus/pci/devices" / folder.name.lower() / "numa_node")
        node = int(text) if text and int(text) >= 0 else 0 if has_one_node else None
        found[facts.get("GPU UUID", folder.name)] = Gpu(bus_id=folder.name.lower(), node=node)
    return found


def _visible(gpus: Mapping[str, Gpu], env: Mapping[str, str]) -> tuple[Gpu, ...]:
    """CUDA stops at the first entry that it can't use."""
    every = tuple(gpus.values())
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not every:
        return every
    found = []
    for entry in (word.strip() for word in visible.split(",")):
        if entry.startswith("MIG-"):
            nodes = {gpu.node for gpu in every}  # which GPU it is a part of, NVML alone knows
            found.append(Gpu(node=nodes.pop() if len(nodes) == 1 else None))
        elif entry.isdigit() and int(entry) < len(every):
            found.append(every[int(entry)])
        elif entry.startswith("GPU-") and (own := [gpu for uuid, gpu in gpus.items() if uuid.startswith(entry)]):
            found.append(own[0])
        else:
            break
    return tuple(found)


def _cpu_list(text: str) -> frozenset[int]:
    bounds = (part.partition("-") for part in text.split(",") if part)
    return frozenset(cpu for first, _, last in bounds for cpu in range(int(first), int(last or first) + 1))


def _text(path: Path) -> str:
    return kernel_text(str(path)).strip()
