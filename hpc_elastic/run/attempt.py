"""One execution of the job: attempt.json, written by the supervisor before the agents start, read by them and later."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct, field

from hpc_elastic.base import codec
from hpc_elastic.base.files import Unreadable
from hpc_elastic.errors import UnreadableFileError

_JOB_ID = re.compile(r"[1-9][0-9]{0,9}(?:[_+][0-9]{1,10})?\Z")


def is_job_id(value: object) -> bool:
    """Whether it is a Slurm job's id: ``70``, an array's task ``70_3``, a component of a het job ``70+1``.

    Ids stand in files that another user may have prepared, and go to Slurm's commands, where ``--user=root`` would be
    an option: what is read is passed on only if it is one.
    """
    return isinstance(value, str) and _JOB_ID.match(value) is not None


class UnreadableAttemptError(UnreadableFileError):
    """attempt.json is missing, torn, or of another version."""


class AttemptInfo(Struct, frozen=True, kw_only=True):
    """Facts that hold for the whole attempt."""

    number: int
    cluster: str
    """``slurm`` or ``local``."""
    nodes: tuple[str, ...]
    """Node names in Slurm's order; the index is the node index everywhere."""
    batch_host: str
    started_ns: int
    """The batch host's wall clock."""
    job_id: str | None = None
    """As Slurm's commands take it: ``70_1`` for an array task."""
    slurm_job_ids: tuple[str, ...] = ()
    """SLURM_JOB_ID of this attempt and of those before it, each once, the newest first: a follow-on job has its own."""
    restart_count: int = 0
    """SLURM_RESTART_COUNT."""
    requeue_armed: bool = False
    requeue_reason: str = ""
    requeue_way: str = "requeue"
    """How, where it is armed: ``requeue``, or ``chain`` for a follow-on job."""
    kill_wait: float | None = None
    """Seconds between Slurm's SIGTERM and SIGKILL."""
    versions: Mapping[str, str] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        codec.save(path, self, durable=True)


def load_attempt(path: Path) -> AttemptInfo:
    """Read attempt.json.

    Raises:
        UnreadableAttemptError: it can't be.
    """
    found = codec.load(path, AttemptInfo)
    if isinstance(found, Unreadable):
        raise UnreadableAttemptError(path=str(path), why=found, errno=found.errno)
    if not (found.job_id is None or is_job_id(found.job_id)):
        raise UnreadableAttemptError(path=str(path), why=f"unreadable: job_id {found.job_id!r} is no job's id")
    return found
