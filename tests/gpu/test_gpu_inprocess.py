"""In-process restart on a GPU: the health check, the count of faults, the abort of NCCL, a device-side assert."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rigs.inprocess_ranks import run_ranks

pytestmark = pytest.mark.gpu


def test_a_context_that_an_assert_has_spoilt_does_not_pass_the_health_check(
    tmp_path: Path, seen: Callable[[str, str], None]
) -> None:
    job = run_ranks("spoilt_context", 1, tmp_path)
    assert job.ranks[0].error.startswith("HealthCheckError: rank 0 is not healthy:"), job.output
    seen("in-process: a spoilt context", job.ranks[0].error.splitlines()[0])


def test_a_gpu_that_does_not_answer_does_not_pass_the_health_check(
    tmp_path: Path, seen: Callable[[str, str], None]
) -> None:
    job = run_ranks("busy_gpu", 1, tmp_path)
    assert "has not answered after 2 s" in job.ranks[0].error, job.output
    seen("in-process: a GPU that does not answer", job.ranks[0].error.splitlines()[0])


def test_faults_are_counted_while_the_gpu_stays_healthy(tmp_path: Path) -> None:
    job = run_ranks("counted_faults", 1, tmp_path, device="cuda")
    assert "rank 0 has caused 2 faults" in job.ranks[0].error, job.output


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_nccl_group_is_aborted_and_made_anew(
    tmp_path: Path, seen: Callable[[str, str], None], request: pytest.FixtureRequest, ranks: int
) -> None:
    """By ncclCommAbort; with two ranks, one of them waits in a collective that never comes about."""
    way = request.getfixturevalue("way") if ranks > 1 else "as it is"
    job = run_ranks("blocked_nccl", ranks, tmp_path, way=way)
    assert [(result or [])[:2] for result in job.results] == [[1, float(ranks)]] * ranks, job.output
    slowest = max(result[2] for result in job.results)
    assert slowest < 60, f"NCCL's own timeout is minutes\n{job.output}"
    seen(f"in-process: NCCL's abort, ranks: {ranks}", f"{slowest:.1f} s from the fault to the next end")
