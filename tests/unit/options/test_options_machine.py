"""``--nproc-per-node auto|gpu|cpu`` without Slurm."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_elastic.errors import UsageError
from hpc_elastic.options.run_request import workers_here

CPUS = len(os.sched_getaffinity(0))


def workers(asked: str, there: int | None, visible: str | None = None, devices: Path = Path("/none")) -> int:
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return workers_here(asked, env, count_gpus=lambda _: there, devices=devices)


@pytest.mark.parametrize("asked", ["auto", "gpu"])
@pytest.mark.parametrize(
    ("there", "visible", "expected"),
    [(8, None, 8), (8, "0,1", 2), (4, "2,7,1", 1), (2, "GPU-8932f937,GPU-46a3", 2), (1, "0", 1)],
)
def test_the_machines_gpus_are_counted_as_far_as_they_are_visible(
    asked: str, there: int, visible: str | None, expected: int
) -> None:
    assert workers(asked, there, visible) == expected


@pytest.mark.parametrize(("there", "visible"), [(0, None), (None, None), (8, ""), (0, "0,1"), (4, "-1")])
def test_without_a_gpu_auto_is_the_cpus_and_gpu_is_refused(there: int | None, visible: str | None) -> None:
    assert workers("auto", there, visible) == CPUS
    with pytest.raises(UsageError, match="--nproc-per-node gpu: this machine has no NVIDIA GPU for the workers"):
        workers("gpu", there, visible)


def test_cpu_is_what_this_process_may_use() -> None:
    assert workers("cpu", 8) == CPUS


def test_where_the_driver_does_not_answer_its_devices_count(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "nvidia-modeset"):
        (tmp_path / name).touch()
    assert workers("gpu", None, devices=tmp_path) == 3


def test_the_real_question_is_answered_on_any_machine() -> None:
    assert workers_here("auto", {**os.environ, "CUDA_VISIBLE_DEVICES": ""}) == CPUS
