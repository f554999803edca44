"""Failures of a Slurm command, distinguished by the text that it prints (exit codes are mostly 1).

Checked on the messages of 20.11, 22.05, 24.11 and 26.05.
"""

from __future__ import annotations

import re
from typing import Any

from hpc_elastic.errors import HpcElasticError


class SlurmError(HpcElasticError):
    """There is no `rc` where the command never ended or never began."""

    template = "{what}: {why}"

    def __init__(self, **facts: Any) -> None:
        super().__init__(**{"argv": (), "rc": None, "stdout": "", "stderr": "", **facts})


class SlurmMissingError(SlurmError):
    """The command is not installed, or not on PATH (a container without Slurm)."""


class SlurmUnavailableError(SlurmError):
    """The controller could not be reached, or did not answer in time: nothing is known; try again."""


class UnknownJobError(SlurmError):
    """Slurm does not know the job (any more)."""


class SlurmPermissionError(SlurmError):
    """The job is another user's, or only an operator may do this."""


class RequeueDisabledError(SlurmError):
    """The job was submitted with --no-requeue, or the site turned requeueing off. Its owner may set Requeue=1."""


class JobNotPendingError(SlurmError):
    """This can only be changed while the job is pending."""


class SubmissionRefusedError(SlurmError):
    """sbatch did not take the job."""


class MaybeSubmittedError(SlurmError):
    """sbatch failed, and Slurm does not show whether it took the job: it may yet."""


# In this order: a message may hold more than one. "Unexpected message received" is what `scontrol requeue` says
# without a controller (all versions tried).
_PATTERNS: tuple[tuple[type[SlurmError], re.Pattern[str]], ...] = tuple(
    (error, re.compile(pattern, re.IGNORECASE))
    for error, pattern in (
        (
            SlurmUnavailableError,
            r"unable to contact slurm controller|unexpected message received|could not establish a configuration source"
            r"|socket timed out|zero bytes were transmitted|connection refused|connection timed out|no route to host"
            r"|protocol authentication error|munge encode failed|standby mode|resource temporarily unavailable"
            r"|communication connection failure"
            # Another cluster: its controller or the accounting that knows its address does not answer.
            r"|can'?t? be reached now|problem talking to (?:the )?database|unable to connect to database"
            r"|no cluster '.*' known by database",
        ),
        (RequeueDisabledError, r"requested operation is presently disabled"),
        (JobNotPendingError, r"job is no longer pending execution"),
        (UnknownJobError, r"invalid job id"),
        (SlurmPermissionError, r"access/permission denied|invalid user id"),
    )
)
_PREFIX = re.compile(
    r"\A(?:s(?:batch|run|queue|control|cancel|info|alloc)|slurm_\w+)?(?:: | )?(?:error|fatal): ?|\As\w+: "
)


def classify(text: str) -> type[SlurmError]:
    return next((error for error, pattern in _PATTERNS if pattern.search(text)), SlurmError)


def is_limit(why: str) -> bool:
    """Return whether a refusal is for a limit of the account or the QOS: a job's size, its time, the number of jobs."""
    return "violates accounting/QOS policy" in why


def one_line(text: str) -> str:
    """A command's messages on one line, without ``sbatch: error:`` before each, at most 500 characters."""
    lines = [_PREFIX.sub("", line.strip()) for line in text.splitlines()]
    joined = "; ".join(line.rstrip(".") for line in lines if line and not line.startswith('Try "'))
    return joined if len(joined) <= 500 else joined[:497] + "..."
