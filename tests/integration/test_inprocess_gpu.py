"""The in-process ring on a GPU: the health check, the abort of NCCL, a device-side assert. Skipped without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rigs.inprocess_ranks import run_ranks

GPUS = len(list(Path("/dev").glob("nvidia[0-9]*")))
"""Looked for, and not asked of torch: its threads would be pytest's."""

pytestmark = [
    pytest.mark.torch,
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS == 0, reason="needs a GPU, and torch with CUDA: there is none here"),
]


def test_a_context_that_an_assert_has_spoilt_does_not_pass_the_health_check(tmp_path: Path) -> None:
    job = run_ranks("spoilt_context", 1, tmp_path)
    assert job.ranks[0].error.startswith("HealthCheckError: rank 0 is not healthy:"), job.output


def test_a_gpu_that_does_not_answer_does_not_pass_the_health_check(tmp_path: Path) -> None:
    job = run_ranks("busy_gpu", 1, tmp_path)
    assert "has not answered after 2 s" in job.ranks[0].error, job.output


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_a_blocked_nccl_collective_is_aborted(tmp_path: Path) -> None:
    job = run_ranks("blocked_nccl", 2, tmp_path)
    assert [result[:2] for result in job.results] == [[1, 2.0], [1, 2.0]], job.output
    assert all(result[2] < 60 for result in job.results), "NCCL's own timeout is minutes"


def test_a_group_of_one_on_nccl_is_made_anew_after_an_exception(tmp_path: Path) -> None:
    job = run_ranks("blocked_nccl", 1, tmp_path)
    assert job.results[0][:2] == [1, 1.0], job.output
