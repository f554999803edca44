"""A notice as whoever gave it remembers it: when the job ends by it, and when the run is to be closed at the latest."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_elastic.rendezvous.notice import Notice, seconds_to_save

NOTICE_SLACK = 5.0
"""After the time in which workers may save: how long the nodes may take to close the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenNotice:
    """On the giver's monotonic clock."""

    notice: Notice
    job_ends: float
    """When the job is ended from outside."""
    closed_by: float
    """When the giver closes the run itself, since the nodes have not."""

    @classmethod
    def now(cls, reason: str, left: float, *, shutdown_timeout: float, now: float) -> GivenNotice:
        """Args:
        reason: Who heard what, and what it means.
        left: Seconds until the job is ended from outside.
        shutdown_timeout: The workers' grace, in seconds.
        now: The time.
        """
        seconds = seconds_to_save(left, shutdown_timeout=shutdown_timeout)
        return cls(
            notice=Notice(reason, seconds, left=left), job_ends=now + left, closed_by=now + seconds + NOTICE_SLACK
        )
