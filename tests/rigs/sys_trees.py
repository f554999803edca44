"""Trees of /sys as Linux shows them, for machines that are not here: CPUs, NUMA nodes, caches and GPUs.

The files and their formats are those of kernel 6.1, as `VIRTUAL_MACHINE` was captured with::

    cd /sys/devices/system
    grep -r . cpu/cpu[0-9]*/{topology/{thread_siblings_list,physical_package_id},cache/index*} node

The other machines are given by their shape.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from hpc_elastic.base.text import ranges

UUID = "GPU-5f0d1c7a-0000-0000-0000-{:012d}"

VIRTUAL_MACHINE = {
    **{f"cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu}" for cpu in (0, 1)},
    **{f"cpu/cpu{cpu}/topology/physical_package_id": "0" for cpu in (0, 1)},
    **{
        f"cpu/cpu{cpu}/cache/index{index}/{name}": value
        for cpu in (0, 1)
        for index, (level, kind, shared) in enumerate(
            [
                ("1", "Data", f"{cpu}"),
                ("1", "Instruction", f"{cpu}"),
                ("2", "Unified", f"{cpu}"),
                ("3", "Unified", "0-1"),
            ]
        )
        for name, value in (("level", level), ("type", kind), ("shared_cpu_list", shared))
    },
    "node/node0/cpulist": "0-1",
    "node/node0/distance": "10",
    "node/possible": "0",
}
"""A virtual machine of two CPUs on an AMD EPYC; captured on 2026-11-23, Linux 6.1."""


class Shape(Struct, frozen=True, kw_only=True):
    sockets: int = 1
    nodes_per_socket: int = 1
    complexes_per_node: int = 1
    cores_per_complex: int = 4
    threads: int = 1
    """Of each core. The second ones are numbered after all first ones, as Linux does on x86."""
    gpus: Sequence[int] = ()
    """The NUMA node of each, in the order of their PCI addresses; -1: the firmware does not say."""
    cpuless: int = 0
    """NUMA nodes with memory alone, behind the others."""

    @property
    def cores(self) -> int:
        return self.sockets * self.nodes_per_socket * self.complexes_per_node * self.cores_per_complex

    @property
    def cpus(self) -> frozenset[int]:
        return frozenset(range(self.cores * self.threads))


class SysTree:
    """A machine's files below a folder: ``sys``, ``driver``, ``dev``."""

    def __init__(self, root: Path, shape: Shape) -> None:
        self.root = root
        self.shape = shape
        self._write_cpus()
        for index, node in enumerate(shape.gpus):
            self.add_gpu(index, node)

    @property
    def paths(self) -> dict[str, Path]:
        """As `read_machine` takes them."""
        return {"system": self.root / "sys", "driver": self.root / "driver", "devices": self.root / "dev"}

    def add_gpu(self, index: int, node: int) -> str:
        """Returns its PCI address."""
        bus_id = f"0000:{0x10 * (index + 1):02x}:00.0"
        write(self.root / "sys/bus/pci/devices" / bus_id / "numa_node", f"{node}")
        facts = (
            f"Model: \t\t NVIDIA H100\nGPU UUID: \t {UUID.format(index)}\nDevice Minor: \t {index}\nGPU Excluded:\t No"
        )
        write(self.root / "driver" / bus_id / "information", facts)
        write(self.root / f"dev/nvidia{index}", "")
        return bus_id

    def hide_gpu(self, minor: int) -> None:
        """As a cgroup does that forbids the device."""
        os.unlink(self.root / f"dev/nvidia{minor}")

    def _write_cpus(self) -> None:
        shape, system = self.shape, self.root / "sys/devices/system"
        per_node = shape.complexes_per_node * shape.cores_per_complex
        nodes = shape.sockets * shape.nodes_per_socket
        for cpu in sorted(shape.cpus):
            core = cpu % shape.cores
            first = core - core % shape.cores_per_complex
            folder = system / f"cpu/cpu{cpu}"
            write(folder / "topology/thread_siblings_list", self._threads_of([core]))
            write(folder / "topology/physical_package_id", f"{core // (per_node * shape.nodes_per_socket)}")
            shared = {"L1d": [core], "L1i": [core], "L2": [core], "L3": range(first, first + shape.cores_per_complex)}
            for index, (name, cores) in enumerate(shared.items()):
                kind = {"d": "Data", "i": "Instruction"}.get(name[2:], "Unified")
                write(folder / f"cache/index{index}/level", name[1])
                write(folder / f"cache/index{index}/type", kind)
                write(folder / f"cache/index{index}/shared_cpu_list", self._threads_of(cores))
        for node in range(nodes + shape.cpuless):
            cores = range(node * per_node, (node + 1) * per_node) if node < nodes else ()
            write(system / f"node/node{node}/cpulist", self._threads_of(cores))
            write(system / f"node/node{node}/distance", " ".join(self._distances(node, nodes + shape.cpuless)))
        write(system / "node/possible", f"0-{nodes + shape.cpuless - 1}")

    def _threads_of(self, cores: Sequence[int]) -> str:
        return ranges([core + thread * self.shape.cores for core in cores for thread in range(self.shape.threads)])

    def _distances(self, node: int, count: int) -> list[str]:
        socket = node // self.shape.nodes_per_socket
        return [
            "10" if other == node else "12" if other // self.shape.nodes_per_socket == socket else "32"
            for other in range(count)
        ]


def write_tree(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        write(folder / name, text)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
