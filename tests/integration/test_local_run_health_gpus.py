"""GPUs by NVML: the real program against a library with NVML's interface, built here."""

from __future__ import annotations

import os
import queue
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_elastic.agent.health import GpuDevice, GpuFacts, gpus_from_json
from hpc_elastic.agent.health_checks import HealthChecks, HealthSite
from hpc_elastic.agent.part import HealthVerdict
from hpc_elastic.base.clock import SystemClock
from hpc_elastic.base.host_facts import module_command
from hpc_elastic.base.loop import wait_readable
from hpc_elastic.options.run_request import workers_here
from hpc_elastic.run.option_values import Check
from hpc_elastic.workers.spawn import Inherited
from tests.rigs.fake_nvml import build_nvml
from tests.rigs.waiting import until


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders with libnvidia-ml.so.1: ``new``, and ``old``, which knows nothing of remapped rows."""
    new, old = tmp_path_factory.mktemp("new"), tmp_path_factory.mktemp("old")
    return {"new": build_nvml(new), "old": build_nvml(old, "-DOLD")}


def ask(library: str, **environ: str) -> GpuFacts:
    argv = module_command("hpc_elastic.agent.health", "print_gpus")
    env = {**os.environ, "LD_LIBRARY_PATH": library, **environ}
    return gpus_from_json(subprocess.run(argv, env=env, stdout=subprocess.PIPE, text=True, check=False).stdout)


def test_what_nvml_says(libraries: dict[str, str], tmp_path: Path) -> None:
    facts = ask(
        libraries["new"], FAKE_NVML="0:ecc=0;1:ecc=3;2:ecc=-3,pages=1;3:pending=1;4:failed=1;5:handle=15;6:ecc=-15"
    )
    uuids = [f"GPU-{index:08d}-0000-0000-0000-000000000000" for index in range(7)]
    assert facts == GpuFacts(
        devices=(
            GpuDevice(index=0, uuid=uuids[0], uncorrectable=0, waits_for_reset=False, remap_failed=False),
            GpuDevice(index=1, uuid=uuids[1], uncorrectable=3, waits_for_reset=False, remap_failed=False),
            GpuDevice(index=2, uuid=uuids[2], uncorrectable=None, waits_for_reset=True, remap_failed=False),
            GpuDevice(index=3, uuid=uuids[3], uncorrectable=0, waits_for_reset=True, remap_failed=False),
            GpuDevice(index=4, uuid=uuids[4], uncorrectable=0, waits_for_reset=False, remap_failed=True),
            GpuDevice(index=5, error="GPU is lost"),
            GpuDevice(index=6, error="GPU is lost"),
        )
    )
    old = ask(libraries["old"], FAKE_NVML="0:pages=0")
    assert old.devices[0].remap_failed is None
    assert ask(libraries["new"], FAKE_NVML="", FAKE_NVML_INIT="9") == GpuFacts(error="the driver is not loaded")
    assert ask(libraries["new"], FAKE_NVML="0:", FAKE_NVML_INIT="crash").error == "asking it failed"
    assert not ask(str(tmp_path)).is_there


def test_what_the_driver_and_the_gpus_are(libraries: dict[str, str]) -> None:
    facts = ask(libraries["new"], FAKE_NVML="0:h100=1;1:", FAKE_NVML_DRIVER="550.54")
    assert facts.driver == "550.54"
    assert [device.name for device in facts.devices[:2]] == ["NVIDIA H100 80GB HBM3", ""]


def test_the_workers_of_a_machine_are_its_gpus(libraries: dict[str, str]) -> None:
    """``--nproc-per-node gpu`` without Slurm."""
    env = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    env |= {"LD_LIBRARY_PATH": libraries["new"], "FAKE_NVML": "0:;1:;2:"}
    assert workers_here("gpu", env) == workers_here("auto", env) == 3
    assert workers_here("gpu", {**env, "CUDA_VISIBLE_DEVICES": "2,0"}) == 2
    assert workers_here("auto", {**env, "FAKE_NVML_INIT": "9"}) == len(os.sched_getaffinity(0))


def verdict_of(library: str, *, given: int, **environ: str) -> HealthVerdict:
    checks = HealthChecks(
        HealthSite(
            limits={Check.GPU: 1},
            environ={**os.environ, "LD_LIBRARY_PATH": library, **environ},
            inherited=Inherited(umask=0o077, core_limit=(0, 0), subreaper=False),
            gpus_given=given,
        ),
        clock=SystemClock(),
    )
    checks.on_join(-1)
    wait_readable(checks.watched(), 30.0)
    found = checks.take()
    checks.close()
    assert not checks.pids
    assert found is not None
    return found


def test_a_node_with_a_broken_gpu_is_unfit(libraries: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    library = libraries["new"]
    assert verdict_of(library, given=2, FAKE_NVML="0:;1:").is_healthy
    bad = verdict_of(library, given=3, FAKE_NVML="0:;1:;2:ecc=3")
    assert bad.reason == "health check failed: GPU 2 has 3 uncorrectable ECC errors"
    assert verdict_of(library, given=0, FAKE_NVML="0:ecc=3").is_healthy
    monkeypatch.setattr("hpc_elastic.agent.health.GPU_SECONDS", 0.5)
    hung = verdict_of(library, given=1, FAKE_NVML="0:", FAKE_NVML_INIT="hang")
    assert hung.reason == "health check failed: NVML has not answered for 0.5 s"


# -- memory that ended workers held, and how busy GPUs are -----------------------------------------------------------

UUID = "GPU-00000000-0000-0000-0000-000000000000"
RUN_TAG = {"HPC_ELASTIC_TAG": "run:local-0:agent"}


@pytest.fixture
def sleeper(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    """A living process, with the tag that the test gives."""
    env = {**os.environ, "HPC_ELASTIC_TAG": getattr(request, "param", "")}
    with subprocess.Popen(["sleep", "1000"], env=env) as process:
        # Popen returns in the middle of the exec: the environment shows a moment later.
        until(lambda: b"HPC_ELASTIC_TAG=" in Path(f"/proc/{process.pid}/environ").read_bytes())
        yield process
        process.kill()


def held(libraries: dict[str, str], spec: str, *, library: str = "new") -> int | None:
    (device,) = ask(libraries[library], FAKE_NVML=spec, **RUN_TAG).devices
    return None if device.held is None else device.held >> 20


def test_memory_that_no_living_process_of_others_explains(libraries: dict[str, str]) -> None:
    assert held(libraries, "0:used=70000") == 70000
    assert held(libraries, "0:used=70000", library="old") == 70600  # with what the driver keeps for itself
    assert held(libraries, "0:") is None  # MIG, and what knows no figure
    assert held(libraries, f"0:used=70000,pid={2**22 + 1},its=69000") == 70000  # it is gone
    assert held(libraries, f"0:used=70000,pid={os.getpid()},its=69000") == 1000  # this one is none of the workers
    assert held(libraries, f"0:used=70000,pid={os.getpid()},its=-1") is None


@pytest.mark.parametrize("sleeper", ["run:local-0:other", "run:local-1:agent", "else:local-0:agent"], indirect=True)
def test_a_process_of_this_node_s_workers_is_waited_for(
    libraries: dict[str, str], sleeper: subprocess.Popen[bytes]
) -> None:
    tag = dict(line.partition("=")[::2] for line in Path(f"/proc/{sleeper.pid}/environ").read_text().split("\0"))
    is_ours = tag["HPC_ELASTIC_TAG"].startswith("run:local-0:")
    assert held(libraries, f"0:used=70000,pid={sleeper.pid},its=69000") == (70000 if is_ours else 1000)


def test_how_busy_a_gpu_is(libraries: dict[str, str]) -> None:
    one, other = ask(libraries["new"], FAKE_NVML="0:busy=100,mem=1;1:").devices
    assert (one.use, one.memory_use) == (100, 1)
    assert (other.use, other.memory_use) == (None, None)


class Rounds:
    """A node's checks from round to round."""

    def __init__(self, library: str, state: Path, *, limits: dict[Check, float] | None = None) -> None:
        self.state = state
        state.write_text("0:used=300")
        environ = {**os.environ, "LD_LIBRARY_PATH": library, "FAKE_NVML_FILE": str(state), **RUN_TAG}
        self.checks = HealthChecks(
            HealthSite(
                limits={Check.GPU: 1, Check.GPU_MEMORY: 50} if limits is None else limits,
                environ=environ,
                inherited=Inherited(umask=0o077, core_limit=(0, 0), subreaper=False),
                gpus_given=1,
            ),
            clock=SystemClock(),
        )
        self.round = -1

    def begin(self) -> None:
        self.checks.on_join(self.round)
        self.round += 1

    def verdict(self, within: float = 30.0) -> HealthVerdict | None:
        wait_readable(self.checks.watched(), within)
        return self.checks.take()

    def pass_first(self) -> None:
        self.begin()
        first = self.verdict()
        assert first is not None
        assert first.is_healthy
        assert not first.notes


def test_a_node_waits_for_the_memory_that_its_workers_held(libraries: dict[str, str], tmp_path: Path) -> None:
    rounds = Rounds(libraries["new"], tmp_path / "state")
    rounds.pass_first()
    rounds.state.write_text("0:used=71980")
    rounds.begin()
    assert rounds.verdict(1.0) is None
    rounds.state.write_text("0:used=400")  # another 100 MiB are no reason to wait
    verdict = rounds.verdict()
    assert verdict is not None
    assert verdict.is_healthy
    (note,) = verdict.notes
    assert note.startswith("waited ")
    assert note.endswith(" s for 70.0 GiB of GPU memory that ended workers held")
    rounds.begin()
    again = rounds.verdict()
    assert again is not None
    assert again.is_healthy
    assert not again.notes
    rounds.checks.close()


def test_a_gpu_that_stays_full_makes_the_node_unfit(libraries: dict[str, str], tmp_path: Path) -> None:
    limits = {Check.GPU_MEMORY: 1.0}
    rounds = Rounds(libraries["new"], tmp_path / "state", limits=limits)
    rounds.pass_first()
    rounds.state.write_text("0:used=71980")
    rounds.begin()
    verdict = rounds.verdict()
    assert verdict is not None
    assert verdict.checks == ("gpu-memory",)
    assert verdict.reason == (
        "health check failed: 70.0 GiB of GPU 0's memory are still in use 1 s after its workers' end"
    )
    rounds.checks.close()


@pytest.mark.parametrize("limits", [{Check.GPU: 1.0}, {}])
def test_nothing_is_waited_for_where_the_user_wants_that(
    libraries: dict[str, str], tmp_path: Path, limits: dict[Check, float]
) -> None:
    rounds = Rounds(libraries["new"], tmp_path / "state", limits=limits)
    rounds.pass_first()
    rounds.state.write_text("0:used=71980")
    rounds.begin()
    verdict = rounds.verdict()
    assert verdict is not None
    assert verdict.is_healthy
    rounds.checks.close()


def test_a_look_at_the_gpus_beside_the_checks(libraries: dict[str, str], tmp_path: Path) -> None:
    rounds = Rounds(libraries["new"], tmp_path / "state")
    rounds.state.write_text("0:busy=100,mem=0,used=70000")
    found: queue.Queue[GpuFacts] = queue.Queue()
    rounds.checks.look_at_gpus(found.put)
    assert [device.use for device in found.get(timeout=30).devices] == [100]
    rounds.checks.close()
    assert not rounds.checks.pids
