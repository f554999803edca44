"""Each check of the nodes' interpreters and GPUs in both outcomes."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from hpc_elastic.agent.health import GpuDevice, GpuFacts
from hpc_elastic.doctor.checks import DoctorFinding, Severity
from hpc_elastic.doctor.host import GpusFacts, PythonFacts, judge_node_gpus, judge_pythons
from hpc_elastic.run.spec import Container, ContainerImage, Runtime

OK, WARNING, PROBLEM = Severity.OK, Severity.WARNING, Severity.PROBLEM

PYTHON = PythonFacts(executable="/env/bin/python", version="3.11.7", torch="2.13.0+cu130", seconds=9.0)
IMAGE = Container(image=ContainerImage(runtime=Runtime.CHARLIECLOUD, image="/images/torch"))


def node(**changes: object) -> PythonFacts:
    return replace(PYTHON, **changes)  # type: ignore[arg-type]


def judged(*odd: PythonFacts, container: Container | None = None) -> list[DoctorFinding]:
    """Three nodes, and those given after them."""
    return list(
        judge_pythons({f"n{number}": facts for number, facts in enumerate([*[PYTHON] * 3, *odd], 1)}, container)
    )


def one(found: list[DoctorFinding], check: str) -> DoctorFinding:
    (finding,) = [finding for finding in found if finding.check == check]
    if finding.level is not OK:
        assert finding.means, "what it means for a run"
        assert finding.way_out
    return finding


def test_nodes_that_are_alike_have_no_problem() -> None:
    assert [(each.level, f"{each.check}: {each.found}") for each in judged()] == [
        (OK, "nodes.python: Python 3.11.7 (/env/bin/python) on n[1-3]"),
        (OK, "nodes.torch: torch 2.13.0+cu130, imported in 9.0 s at most (n3)"),
    ]


@pytest.mark.parametrize(
    ("check", "odd", "level", "found"),
    [
        (
            "nodes.python",
            node(error="/env/bin/python: No such file or directory"),
            PROBLEM,
            "/env/bin/python: No such file or directory on n4",
        ),
        (
            "nodes.python",
            node(version="3.9.18"),
            WARNING,
            "Python 3.11.7 (/env/bin/python) on n[1-3], Python 3.9.18 (/env/bin/python) on n4",
        ),
        (
            "nodes.torch",
            node(torch="", torch_error="ImportError: libcudart.so.13"),
            WARNING,
            "ImportError: libcudart.so.13 on n4",
        ),
        ("nodes.torch", node(torch="2.12.1+cu130"), PROBLEM, "torch 2.13.0+cu130 on n[1-3], torch 2.12.1+cu130 on n4"),
        ("nodes.torch", node(seconds=45.0), WARNING, "torch 2.13.0+cu130, imported in 45.0 s"),
    ],
)
def test_a_node_that_is_unlike_the_others(check: str, odd: PythonFacts, level: Severity, found: str) -> None:
    finding = one(judged(odd), check)
    assert finding.level is level
    assert finding.found.startswith(found)


def test_one_interpreter_that_starts_nowhere_leaves_nothing_to_compare() -> None:
    facts = PythonFacts(error="python3 is no Python")
    (found,) = judge_pythons({"n1": facts, "n2": facts}, None)
    assert (found.check, found.found) == ("nodes.python", "python3 is no Python on n[1-2]")
    assert list(judge_pythons({}, None)) == []


def test_an_image_is_judged_by_its_own_interpreter() -> None:
    good = one(judged(container=IMAGE), "nodes.container")
    assert good.found == "charliecloud:/images/torch: Python 3.11.7 (/env/bin/python) on n[1-3]"
    bad = one(judged(node(error="ch-run: No such file or directory"), container=IMAGE), "nodes.container")
    assert bad.level is PROBLEM
    assert bad.found == "charliecloud:/images/torch: ch-run: No such file or directory on n4"
    assert "module load" in bad.way_out
    here = list(judge_pythons({"login": node(error="ch-run: No such file or directory")}, IMAGE, of="software"))
    assert [(each.check, each.level) for each in here] == [("software.container", WARNING)]
    pyxis = replace(IMAGE, image=ContainerImage(runtime=Runtime.PYXIS, image="torch"))
    (untried,) = judge_pythons({}, pyxis)
    assert untried.found == "pyxis:torch: not tried: srun alone starts it"


# -- GPUs ----------------------------------------------------------------------------------------------------------

H100 = GpuDevice(index=0, name="NVIDIA H100 80GB HBM3", uuid="GPU-a", uncorrectable=0)
GPUS = GpusFacts(
    nvml=GpuFacts(devices=(H100, replace(H100, index=1, uuid="GPU-b")), driver="550.54.15"), given=2, visible="0,1"
)  # fmt: skip


def gpus(*devices: GpuDevice, **changes: object) -> GpusFacts:
    nvml = replace(GPUS.nvml, devices=devices) if devices else GPUS.nvml
    return replace(GPUS, nvml=nvml, **changes)


def judge_gpus_of(**nodes: GpusFacts) -> list[DoctorFinding]:
    return list(judge_node_gpus(nodes))


def test_gpus_that_are_alike_and_fit_have_no_problem() -> None:
    found = judge_gpus_of(n1=GPUS, n2=GPUS)
    assert {finding.level for finding in found} == {OK}
    assert one(found, "gpu.count").found == "2 × NVIDIA H100 80GB HBM3, driver 550.54.15 on n[1-2]"
    assert len(found) == len({finding.check for finding in found}) == 2


@pytest.mark.parametrize(
    ("check", "odd", "level", "found"),
    [
        (
            "gpu.count",
            gpus(replace(H100, name="NVIDIA A100"), H100),
            WARNING,
            "2 × NVIDIA H100 80GB HBM3, driver 550.54.15 on n1, 2 × NVIDIA A100 and NVIDIA H100 80GB HBM3, driver "
            "550.54.15 on n2",
        ),
        (
            "gpu.count",
            replace(GPUS, nvml=replace(GPUS.nvml, driver="535.1")),
            WARNING,
            "2 × NVIDIA H100 80GB HBM3, driver 550.54.15 on n1, 2 × NVIDIA H100 80GB HBM3, driver 535.1 on n2",
        ),
        ("gpu.errors", replace(GPUS, nvml=GpuFacts(is_there=False)), OK, "not known on n2: no NVML"),
        ("gpu.errors", gpus(H100), PROBLEM, "Slurm gave 2 GPUs, and 1 are there on n2"),
        (
            "gpu.errors",
            gpus(H100, replace(H100, index=1, uncorrectable=3)),
            PROBLEM,
            "GPU 1 has 3 uncorrectable ECC errors on n2",
        ),
        (
            "gpu.errors",
            replace(GPUS, nvml=GpuFacts(error="driver and library are of different versions")),
            PROBLEM,
            "NVML does not work: driver and library are of different versions on n2",
        ),
    ],
)
def test_gpus_in_the_other_outcome(check: str, odd: GpusFacts, level: Severity, found: str) -> None:
    finding = one(judge_gpus_of(n1=GPUS, n2=odd), check)
    assert finding.level is level
    assert finding.found.startswith(found)


def test_nodes_without_gpus_have_one_line() -> None:
    none = GpusFacts(nvml=GpuFacts(is_there=False), given=0)
    (finding,) = judge_gpus_of(n1=none)
    assert finding.level is OK
