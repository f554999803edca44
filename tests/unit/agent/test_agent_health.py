"""What makes a node unfit, from facts alone; and how checks are asked for."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_elastic.agent.health import (
    ClockOffset,
    GpuDevice,
    GpuFacts,
    HealthFinding,
    MemoryFacts,
    RoomFacts,
    SharedFacts,
    did_not_answer,
    judge_clock,
    judge_gpus,
    judge_links,
    judge_memory,
    judge_room,
    judge_script,
    judge_shared,
    sum_up_findings,
)
from hpc_elastic.run.option_values import Check

GIB = 1 << 30


@pytest.mark.parametrize(
    ("interfaces", "is_fit"),
    [
        ([], True),
        ([("eth0", True)], True),
        ([("eth0", False), ("ib0", True)], True),
        ([("eth0", False), ("ib0", False)], False),
    ],
)
def test_a_node_without_any_link_is_unfit(interfaces: list[tuple[str, bool]], is_fit: bool) -> None:
    found = judge_links(interfaces, seconds=3.0)
    assert found.reason == ("" if is_fit else "the network has no link (eth0, ib0), looked at for 3 s")


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (RoomFacts(path="/tmp", free=1 << 20), ""),
        (RoomFacts(path="/tmp", free=(1 << 20) - 1), "/tmp has 1024.0 KiB free, less than 1.0 MiB"),
        (RoomFacts(path="/tmp", free=0), "/tmp has 0 B free, less than 1.0 MiB"),
        (RoomFacts(path="/tmp", free=9 << 20, has_inodes=False), "/tmp has no inode free"),
        (RoomFacts(path="/tmp", error="Input/output error"), "/tmp does not work: Input/output error"),
    ],
)
def test_room(facts: RoomFacts, reason: str) -> None:
    assert judge_room(Check.TMP, facts, least=1 << 20).reason == reason


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (None, ""),
        (MemoryFacts(free=GIB), ""),
        (MemoryFacts(free=GIB - 1, limited_by=""), "1024.0 MiB of memory are free, less than 1.0 GiB"),
        (
            MemoryFacts(free=GIB // 2, limited_by="the cgroup's limit of 8.0 GiB"),
            "512.0 MiB of memory are free below the cgroup's limit of 8.0 GiB, less than 1.0 GiB",
        ),
    ],
)
def test_memory(facts: MemoryFacts | None, reason: str) -> None:
    assert judge_memory(facts, least=GIB).reason == reason


def test_a_run_directory_that_refuses_is_a_reason_and_a_full_one_a_warning() -> None:
    assert judge_shared(SharedFacts(path="/s")) == HealthFinding(check="shared")
    broken = judge_shared(SharedFacts(path="/s", error="Stale file handle"))
    assert broken.reason == "the run directory can't be written: Stale file handle (/s)"
    full = judge_shared(SharedFacts(path="/s", error="Disk quota exceeded", is_full=True))
    assert (full.reason, full.warning) == ("", "/s is full: Disk quota exceeded")


@pytest.mark.parametrize(
    ("least", "most", "words"),
    [
        (-1.0, 1.0, ""),
        (59.0, 61.0, ""),  # it may be within the bound: nothing is said that is not certain
        (60.5, 70.0, "at least 60 s behind"),
        (-70.0, -59.0, ""),
        (-100.0, -90.0, "at least 90 s ahead of"),
    ],
)
def test_a_clock_is_warned_of_and_never_a_reason(least: float, most: float, words: str) -> None:
    finding = judge_clock(ClockOffset(least=least, most=most), most=60)
    assert finding.reason == ""
    assert bool(finding.warning) is bool(words)
    assert words in finding.warning
    assert judge_clock(None, most=60) == HealthFinding(check="clock")


GOOD = GpuDevice(index=0, uuid="GPU-aa", uncorrectable=0, waits_for_reset=False, remap_failed=False)
BAD = GpuDevice(index=1, uuid="GPU-bb", uncorrectable=3)
TO_BE_RESET = "GPU 2 has to be reset (pages or rows of its memory are to be retired)"
NOT_REPAIRED = "GPU 2's memory could not be repaired (row remapping failed)"


def gpu_2(**changes: Any) -> GpuFacts:
    return GpuFacts(devices=(GpuDevice(index=2, **changes),))


@pytest.mark.parametrize(
    ("facts", "given", "visible", "reason"),
    [
        (GpuFacts(devices=(GOOD,)), None, None, ""),
        (GpuFacts(devices=(GpuDevice(index=0),)), None, None, ""),  # it has no such figures
        (GpuFacts(devices=(BAD,)), None, None, "GPU 1 has 3 uncorrectable ECC errors"),
        (gpu_2(uncorrectable=1), None, None, "GPU 2 has 1 uncorrectable ECC error"),
        (gpu_2(waits_for_reset=True), None, None, TO_BE_RESET),
        (gpu_2(waits_for_reset=True, remap_failed=True), None, None, NOT_REPAIRED),
        (gpu_2(error="GPU is lost"), None, None, "GPU 2: GPU is lost"),
        (GpuFacts(is_there=False), 4, "0,1,2,3", ""),  # AMD's, or a container without the library
        (GpuFacts(error="the driver is not loaded"), 4, None, "NVML does not work: the driver is not loaded"),
        (GpuFacts(error="the driver is not loaded"), 0, None, ""),
        (GpuFacts(devices=(GOOD, BAD)), 0, None, ""),  # the job has none: those are others'
        (GpuFacts(devices=(GOOD,)), 2, "0,1", "Slurm gave 2 GPUs, and 1 are there"),
        # Devices are not confined: all of the node show.
        (GpuFacts(devices=(GOOD, BAD)), 1, "0", ""),
        (GpuFacts(devices=(GOOD, BAD)), 1, "1", "GPU 1 has 3 uncorrectable ECC errors"),
        (GpuFacts(devices=(GOOD, BAD)), 1, "GPU-b", "GPU 1 has 3 uncorrectable ECC errors"),
        (GpuFacts(devices=(GOOD, BAD)), 1, "GPU-a", ""),
        (GpuFacts(devices=(GOOD, BAD)), 1, "MIG-1234", ""),
        (GpuFacts(devices=(GOOD, BAD)), 1, None, ""),  # which one is ours can't be told
        (GpuFacts(devices=(GOOD, BAD)), None, "0", ""),
        # They are: the numbers of CUDA_VISIBLE_DEVICES may be the node's.
        (GpuFacts(devices=(GOOD, BAD)), 2, "6,7", "GPU 1 has 3 uncorrectable ECC errors"),
    ],
)
def test_the_job_s_gpus(facts: GpuFacts, given: int | None, visible: str | None, reason: str) -> None:
    assert judge_gpus(facts, given=given, visible=visible, least_errors=1).reason == reason


def test_errors_can_be_allowed() -> None:
    assert judge_gpus(GpuFacts(devices=(BAD,)), given=None, visible=None, least_errors=4).reason == ""
    assert judge_gpus(GpuFacts(devices=(BAD,)), given=None, visible=None, least_errors=3).reason != ""


def test_a_script_s_last_words_are_the_reason() -> None:
    assert judge_script(0, "warning: x", command="c") == HealthFinding(check="script")
    assert judge_script(3, "fan 2 stands", command="c").reason == "fan 2 stands"
    assert judge_script(3, "", command="c").reason == "c ended with exit code 3"
    assert judge_script(-9, "", command="c").reason == "c ended with signal 9"


def test_all_reasons_make_one() -> None:
    assert sum_up_findings([HealthFinding(check="tmp"), HealthFinding(check="clock", warning="w")]).is_healthy
    verdict = sum_up_findings(
        [
            HealthFinding(check="tmp", reason="a"),
            HealthFinding(check="clock", warning="w"),
            did_not_answer("shared", "the run directory's filesystem (/s)", 120.0),
        ]
    )
    assert not verdict.is_healthy
    assert verdict.reason == "health check failed: a; the run directory's filesystem (/s) has not answered for 120 s"
    assert verdict.checks == ("tmp", "shared")
    assert verdict.warnings == {"clock": "w"}
    many = sum_up_findings([HealthFinding(check=str(n), reason=str(n)) for n in range(9)])
    assert many.reason == "health check failed: 0; 1; 2; 3; and 5 more"
