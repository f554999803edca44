"""``--nproc-per-node``: a number, or a word that the node answers."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from hpc_elastic.agent.rendezvous_session import local_world_size
from hpc_elastic.errors import UsageError
from tests.rigs.captures import VERSIONS, captured


def captured_environment(version: str, name: str) -> dict[str, str]:
    _, text, _ = captured(version, name)
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


@pytest.mark.parametrize(("asked", "expected"), [("1", 1), ("4", 4), ("128", 128)])
def test_a_number_is_that_number(asked: str, expected: int) -> None:
    assert local_world_size(asked, {"CUDA_VISIBLE_DEVICES": "0,1"}) == expected


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("0", 1), ("0,1,2,3", 4), ("GPU-8932f937,GPU-46a3", 2), ("", 1), (None, 1), ("NoDevFiles", 1)],
)
def test_auto_outside_of_slurm_counts_the_visible_gpus(visible: str | None, expected: int) -> None:
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert local_world_size("auto", env) == expected


@pytest.mark.parametrize("version", VERSIONS)
def test_auto_in_a_job_is_what_slurm_gave_this_node(version: str) -> None:
    with_gpus = captured_environment(version, "env-gres-gpu2-step-n3-task0")
    without = captured_environment(version, "env-plain-step-n1-task0")
    assert local_world_size("auto", with_gpus) == local_world_size("gpu", with_gpus) == 2
    assert local_world_size("auto", without) == 1


@pytest.mark.parametrize(
    ("env", "way_out"),
    [
        (captured_environment("22.05.8", "env-plain-step-n1-task0"), "--gpus-per-node"),
        ({}, "/nvidia*); give the number of workers"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES='' names no GPU; unset it"),
    ],
    ids=["in a job", "outside", "hidden"],
)
def test_gpu_on_a_node_without_is_refused_with_the_way_out(tmp_path: Path, env: dict[str, str], way_out: str) -> None:
    with pytest.raises(UsageError, match=rf"--nproc-per-node gpu: .*{re.escape(way_out)}"):
        local_world_size("gpu", env, devices=tmp_path)


def test_gpu_outside_of_slurm_is_all_that_the_machine_has(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "nvidia-modeset"):
        (tmp_path / name).touch()
    assert local_world_size("gpu", {}, devices=tmp_path) == 3
    assert local_world_size("gpu", {"CUDA_VISIBLE_DEVICES": "1"}, devices=tmp_path) == 1
    assert local_world_size("auto", {}, devices=tmp_path) == 1, "it is the default, on workstations too"


def test_cpu_is_the_cores_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2, 5} if pid == 0 else set())
    assert local_world_size("cpu", {}) == 3


@pytest.mark.parametrize("asked", ["0", "-1", "many", "", "1.5", "GPU", "4 "])
def test_anything_else_is_refused_by_its_value(asked: str) -> None:
    with pytest.raises(UsageError, match=r"--nproc-per-node") as caught:
        local_world_size(asked, {})
    assert f"--nproc-per-node {asked}:" in str(caught.value)
