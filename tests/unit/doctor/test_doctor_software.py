"""Each check of the nodes' software and GPUs in both outcomes, and what the probes make of an interpreter's answers."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from hpc_elastic.agent.health import GpuDevice, GpuFacts
from hpc_elastic.agent.numa_binding import Gpu, Machine
from hpc_elastic.doctor.findings import Finding, Level
from hpc_elastic.doctor.node_facts import NodeFacts
from hpc_elastic.doctor.software_checks import judge_software
from hpc_elastic.doctor.software_probe import (
    DriverError,
    NodeGpus,
    PythonFacts,
    SoftwareFacts,
    driver_errors,
    far_gpus,
    read_kernel_log,
    shown_environment,
)
from hpc_elastic.run.container import Container, ContainerImage, Runtime

PYTHON = PythonFacts(
    executable="/env/bin/python", version="3.11.7", packages={"numpy": "2.1.0", "torch": "2.13.0"}, torch="2.13.0",
    cuda="13.0", nccl="2.28.9", first_import=9.0, next_import=2.0,
)  # fmt: skip
SHELL = {
    "PATH": "/env/bin:/usr/bin",
    "LD_LIBRARY_PATH": "/opt/cuda/lib",
    "HOME": "/home/ann",
    "WANDB_API_KEY": "secret",
}
IMAGE = Container(image=ContainerImage(runtime=Runtime.CHARLIECLOUD, image="/images/torch"))


def node(environment: dict[str, str] | None = None, **changes: object) -> SoftwareFacts:
    there = {**SHELL, "SLURM_JOB_ID": "7", "RANK": "0", **(environment or {})}
    python = replace(PYTHON, **changes)  # type: ignore[arg-type]
    return SoftwareFacts(python=python, environment=shown_environment(there))


def judged(*odd: SoftwareFacts, shell: dict[str, str] = SHELL, container: Container | None = None) -> list[Finding]:
    """Three nodes, and those given after them."""
    every = [node({"RANK": str(rank), "SLURMD_NODENAME": f"n{rank}"}) for rank in range(3)]
    nodes = {f"n{number}": NodeFacts(node="n", software=facts) for number, facts in enumerate([*every, *odd], 1)}
    return judge_software(nodes, shell=shell, container=container)


def one(found: list[Finding], check: str) -> Finding:
    (finding,) = [finding for finding in found if finding.check == check]
    if finding.level is not Level.OK:
        assert finding.means, "what it means for a run"
        assert finding.way_out
    return finding


def test_nodes_that_are_alike_have_no_problem() -> None:
    found = judged()
    assert {finding.level for finding in found} == {Level.OK}
    assert [f"{finding.check}: {finding.found}" for finding in found] == [
        "nodes.python: Python 3.11.7 (/env/bin/python) on all 3 nodes",
        "nodes.packages: 2 packages, of the same versions on all nodes",
        "nodes.torch: torch 2.13.0 for CUDA 13.0, NCCL 2.28.9, imported in 9.0 s at first, again in 2.0 s",
        "nodes.environment: 4 variables of the same value on all nodes",
        "nodes.shell: as in this shell",
    ]


@pytest.mark.parametrize(
    ("check", "odd", "level", "found"),
    [
        (
            "nodes.python",
            node(error="/env/bin/python: No such file or directory"),
            Level.PROBLEM,
            "/env/bin/python: No such file or directory on n4",
        ),
        (
            "nodes.python",
            node(version="3.9.18"),
            Level.WARNING,
            "Python 3.11.7 (/env/bin/python) on n[1-3], Python 3.9.18 (/env/bin/python) on n4",
        ),
        (
            "nodes.packages",
            node(packages={"numpy": "1.26.4", "torch": "2.13.0"}),
            Level.WARNING,
            "numpy 2.1.0 on n[1-3], 1.26.4 on n4",
        ),
        ("nodes.packages", node(packages={"torch": "2.13.0"}), Level.WARNING, "numpy 2.1.0 on n[1-3], missing on n4"),
        (
            "nodes.torch",
            node(torch="", torch_error="ImportError: libcudart.so.13"),
            Level.WARNING,
            "ImportError: libcudart.so.13 on n4",
        ),
        (
            "nodes.torch",
            node(nccl="2.27.3"),
            Level.PROBLEM,
            "torch 2.13.0 for CUDA 13.0, NCCL 2.28.9 on n[1-3], torch 2.13.0 for CUDA 13.0, NCCL 2.27.3 on n4",
        ),
        (
            "nodes.torch",
            node(next_import=45.0),
            Level.WARNING,
            "torch 2.13.0 for CUDA 13.0, NCCL 2.28.9, imported in 9.0 s at first, again in 45.0 s",
        ),
        (
            "nodes.torch",
            node(first_import=120.0),
            Level.WARNING,
            "torch 2.13.0 for CUDA 13.0, NCCL 2.28.9, imported in 120.0 s at first, again in 2.0 s (on n4)",
        ),
        (
            "nodes.torch",
            node(first_import=28.0),
            Level.WARNING,
            "torch 2.13.0 for CUDA 13.0, NCCL 2.28.9, imported in 28.0 s on n4, in 9.0 s on others",
        ),
        (
            "nodes.environment",
            node({"NCCL_SOCKET_IFNAME": "ib0"}),
            Level.WARNING,
            "differs between nodes: NCCL_SOCKET_IFNAME is not set on n[1-3], ib0 on n4",
        ),
        (
            "nodes.environment",
            node({"WANDB_API_KEY": "another"}),
            Level.WARNING,
            "differs between nodes: WANDB_API_KEY",
        ),
        ("nodes.environment", node({"TMPDIR": "/scratch/7", "SLURM_PROCID": "3"}), Level.OK, "4 variables"),
    ],
)
def test_a_node_that_is_unlike_the_others(check: str, odd: SoftwareFacts, level: Level, found: str) -> None:
    finding = one(judged(odd), check)
    assert finding.level is level
    assert finding.found.startswith(found)
    assert "secret" not in finding.found


def test_one_interpreter_that_starts_nowhere_leaves_nothing_to_compare() -> None:
    facts = SoftwareFacts(python=PythonFacts(error="python3 is no Python"), environment=shown_environment(SHELL))
    nodes = {name: NodeFacts(node=name, software=facts) for name in ("n1", "n2")}
    found = judge_software(nodes, shell=SHELL, container=None)
    assert one(found, "nodes.python").found == "python3 is no Python on n[1-2]"
    assert [finding.check for finding in found] == ["nodes.python", "nodes.environment", "nodes.shell"]
    assert judge_software({"n1": NodeFacts(node="n1")}, shell=SHELL, container=None) == []


@pytest.mark.parametrize(
    ("shell", "level", "found"),
    [
        ({**SHELL, "PATH": "/mine/bin"}, Level.WARNING, "PATH is /env/bin:/usr/bin there, /mine/bin here"),
        ({**SHELL, "PATH": "/usr/bin"}, Level.OK, "as in this shell, but changed PATH"),  # --setup put one before it
        ({**SHELL, "CONDA_PREFIX": "/c"}, Level.WARNING, "CONDA_PREFIX is not set there, /c here"),
        ({**SHELL, "EDITOR": "vi"}, Level.OK, "as in this shell, but without EDITOR"),
        (
            {"PATH": SHELL["PATH"], "HOME": "/home/ann"},
            Level.OK,
            "as in this shell, but added LD_LIBRARY_PATH, WANDB_API_KEY",
        ),
    ],
)
def test_what_reached_the_workers_of_the_shell(shell: dict[str, str], level: Level, found: str) -> None:
    finding = one(judged(shell=shell), "nodes.shell")
    assert (finding.level, finding.found) == (level, found)


def test_an_image_is_judged_by_its_own_interpreter() -> None:
    good = one(judged(container=IMAGE), "nodes.container")
    assert good.found == "charliecloud:/images/torch: Python 3.11.7 (/env/bin/python) on all 3 nodes"
    bad = one(judged(node(error="ch-run: No such file or directory"), container=IMAGE), "nodes.container")
    assert bad.level is Level.PROBLEM
    assert bad.found == "charliecloud:/images/torch: ch-run: No such file or directory on n4"
    assert "module load" in bad.way_out
    pyxis = replace(IMAGE, image=ContainerImage(runtime=Runtime.PYXIS, image="torch"))
    facts = {"n1": NodeFacts(node="n1", software=SoftwareFacts())}
    untried = judge_software(facts, shell={}, container=pyxis)
    assert one(untried, "nodes.container").found == "pyxis:torch was not tried: srun alone starts it"


# -- GPUs ----------------------------------------------------------------------------------------------------------

H100 = GpuDevice(index=0, name="NVIDIA H100 80GB HBM3", uuid="GPU-a", uncorrectable=0)
GPUS = NodeGpus(
    nvml=GpuFacts(devices=(H100, replace(H100, index=1, uuid="GPU-b")), driver="550.54.15"), given=2, visible="0,1",
    has_devices=True,
)  # fmt: skip


def gpus(*devices: GpuDevice, **changes: object) -> NodeGpus:
    nvml = replace(GPUS.nvml, devices=devices) if devices else GPUS.nvml
    return replace(GPUS, nvml=nvml, **changes)


def judge_gpus_of(**nodes: NodeGpus) -> list[Finding]:
    facts = {name: NodeFacts(node=name, gpus=gpus) for name, gpus in nodes.items()}
    return judge_software(facts, shell={}, container=None)


def test_gpus_that_are_alike_and_fit_have_no_problem() -> None:
    found = judge_gpus_of(n1=GPUS, n2=GPUS)
    assert {finding.level for finding in found} == {Level.OK}
    assert one(found, "gpu.count").found == "2 × NVIDIA H100 80GB HBM3, driver 550.54.15 on all 2 nodes"
    assert len(found) == len({finding.check for finding in found}) == 6


@pytest.mark.parametrize(
    ("check", "odd", "level", "found"),
    [
        (
            "gpu.count",
            gpus(replace(H100, name="NVIDIA A100"), H100),
            Level.WARNING,
            "2 × NVIDIA H100 80GB HBM3, driver 550.54.15 on n1, 2 × NVIDIA A100 and NVIDIA H100 80GB HBM3, driver "
            "550.54.15 on n2",
        ),
        (
            "gpu.count",
            replace(GPUS, nvml=replace(GPUS.nvml, driver="535.1")),
            Level.WARNING,
            "2 × NVIDIA H100 80GB HBM3, driver 550.54.15 on n1, 2 × NVIDIA H100 80GB HBM3, driver 535.1 on n2",
        ),
        ("gpu.nvml", replace(GPUS, nvml=GpuFacts(is_there=False)), Level.WARNING, "no libnvidia-ml.so.1 on n2"),
        ("gpu.errors", gpus(H100), Level.PROBLEM, "Slurm gave 2 GPUs, and 1 are there on n2"),
        (
            "gpu.errors",
            gpus(H100, replace(H100, index=1, uncorrectable=3)),
            Level.PROBLEM,
            "GPU 1 has 3 uncorrectable ECC errors on n2",
        ),
        (
            "gpu.errors",
            replace(GPUS, nvml=GpuFacts(error="driver and library are of different versions")),
            Level.PROBLEM,
            "NVML does not work: driver and library are of different versions on n2",
        ),
        (
            "gpu.xid",
            gpus(driver_errors=(DriverError(says="the GPU driver reported Xid 79: gone", ago=7200.0),)),
            Level.WARNING,
            "the GPU driver reported Xid 79: gone 2 h 00 min ago on n2",
        ),
        ("gpu.xid", gpus(driver_errors=(DriverError(says="Xid 48", ago=30 * 86400.0),)), Level.OK, "the kernel's logs"),
        ("gpu.xid", gpus(log_error="/dev/kmsg: Operation not permitted"), Level.OK, "not known: the kernel's log"),
        (
            "gpu.clocks",
            gpus(H100, replace(H100, index=1, slowed=("the hardware", "heat"))),
            Level.WARNING,
            "slowed: GPU 1 by the hardware and heat on n2",
        ),
        (
            "gpu.binding",
            gpus(far=("0000:c1:00.0",)),
            Level.WARNING,
            "the job has no CPU of the NUMA node of GPU 0000:c1:00.0 on n2",
        ),
    ],
)
def test_gpus_in_the_other_outcome(check: str, odd: NodeGpus, level: Level, found: str) -> None:
    finding = one(judge_gpus_of(n1=GPUS, n2=odd), check)
    assert finding.level is level
    assert finding.found.startswith(found)


def test_nothing_is_said_to_be_fit_that_could_not_be_asked() -> None:
    given = NodeGpus(nvml=GpuFacts(is_there=False), given=2)
    assert [finding.check for finding in judge_gpus_of(n1=given)] == ["gpu.nvml", "gpu.count"]


def test_nodes_without_gpus_have_one_line() -> None:
    none = NodeGpus(nvml=GpuFacts(is_there=False), given=0)
    (finding,) = judge_gpus_of(n1=none)
    assert finding.level is Level.OK


# -- measured ------------------------------------------------------------------------------------------------------


def test_the_xids_of_a_kernel_s_log_that_make_the_hardware_suspect(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text(
        "6,1,100,-;Linux version 6.1\n"
        "3,2,50000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=812, GPU has fallen off the bus.\n"
        "3,3,90000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', GPU has fallen off the bus.\n"
        "3,4,91000000,-;NVRM: Xid (PCI:0000:5e:00): 31, pid=900, MMU Fault\n"  # of a script
        "4,5;torn NVRM: Xid (PCI:0000:5e:00): 48\n"
    )
    text, error = read_kernel_log(log)
    assert not error
    (found,) = driver_errors(text, uptime=100.0)
    assert found == DriverError(says="the GPU driver reported Xid 79: the GPU has fallen off the bus", ago=10.0)
    assert read_kernel_log(tmp_path / "none") == ("", f"{tmp_path / 'none'}: No such file or directory")


def test_gpus_that_are_far_from_the_jobs_cpus() -> None:
    machine = Machine(
        nodes={0: frozenset({0, 1})}, distances={0: [10, 20], 1: [20, 10]}, sockets={}, cores={}, caches={},
        gpus=(Gpu(bus_id="0000:3b:00.0", node=0), Gpu(bus_id="0000:c1:00.0", node=1), Gpu(bus_id="0000:d1:00.0")),
    )  # fmt: skip
    assert far_gpus(machine) == ("0000:c1:00.0",)


def test_secrets_are_kept_as_digests() -> None:
    shown = shown_environment(SHELL)
    assert shown["PATH"] == SHELL["PATH"]
    assert shown["WANDB_API_KEY"].startswith("sha256:")
    assert "secret" not in str(shown)
