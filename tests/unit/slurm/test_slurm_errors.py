"""Which error a recorded message means, on one line."""

from __future__ import annotations

import pytest

from hpc_elastic.slurm.commands import (
    JobNotPendingError,
    RequeueDisabledError,
    SlurmError,
    SlurmPermissionError,
    SlurmUnavailableError,
    UnknownJobError,
    classify,
    one_line,
)
from tests.rigs.captures import VERSIONS, captured, exists

KINDS = {
    "err-sbatch-no-controller": SlurmUnavailableError,
    "err-scancel-no-controller": SlurmUnavailableError,
    "err-scontrol-requeue-no-controller": SlurmUnavailableError,
    "err-scontrol-show-job-no-controller": SlurmUnavailableError,
    "err-sinfo-no-controller": SlurmUnavailableError,
    "err-squeue-no-controller": SlurmUnavailableError,
    "err-srun-no-controller": SlurmUnavailableError,
    "err-scontrol-requeue-unknown-job": UnknownJobError,
    "err-scontrol-show-job-unknown": UnknownJobError,
    "err-scontrol-update-unknown-job": UnknownJobError,
    "err-squeue-unknown-job": UnknownJobError,
    "err-squeue-bad-job": UnknownJobError,
    "squeue-finished-past-minjobage": UnknownJobError,
    "scontrol-requeue-finished-past-minjobage": UnknownJobError,
    "err-scontrol-requeue-norequeue-job": RequeueDisabledError,
    "err-scontrol-requeue-other-users-job": SlurmPermissionError,
    "err-scontrol-update-other-users-job": SlurmPermissionError,
    "err-scancel-other-users-job": SlurmPermissionError,
    "err-scontrol-update-completed-job": SlurmError,
    "scontrol-update-comment-completed-job": SlurmError,
    "err-sbatch-bad-nodelist": SlurmError,
    "err-sbatch-bad-partition": SlurmError,
    "err-sbatch-bad-time": SlurmError,
    "err-sbatch-bad-option": SlurmError,
    "err-scontrol-update-bad-key": SlurmError,
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", KINDS)
def test_kinds(version: str, name: str) -> None:
    if not exists(version, name):
        assert "no-controller" in name  # recorded on three versions, not by all commands
        return
    rc, _, stderr = captured(version, name)
    assert rc != 0
    assert classify(stderr) is KINDS[name]


def test_what_owners_may_not_do_to_a_running_job() -> None:
    """As the four versions said, `scontrol update` of a running job's ExcNodeList, StartTime, NumNodes."""
    assert classify("Job is no longer pending execution for job 12\n") is JobNotPendingError
    assert classify("Requested operation not supported on this system for job 12\n") is SlurmError


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "err-sbatch-bad-partition",
            "invalid partition specified: nosuch; Batch job submission failed: Invalid partition name specified",
        ),
        ("err-sbatch-bad-time", "Invalid --time specification"),
        ("err-sbatch-bad-option", "unrecognized option '--nosuch'"),
        ("err-sbatch-bad-begin", "Invalid time specification (pos=0): yesterdayish; Invalid --begin specification"),
        ("err-scontrol-show-job-unknown", "Invalid job id specified"),
        (
            "err-sbatch-dos-lines",
            "Batch script contains DOS line breaks (\\r\\n); instead of expected UNIX line breaks (\\n)",
        ),
    ],
)
def test_one_line(version: str, name: str, line: str) -> None:
    assert one_line(captured(version, name)[2]) == line


def test_one_line_is_bounded() -> None:
    assert len(one_line("sbatch: error: " + "x" * 2000)) == 500
    assert one_line("") == ""
