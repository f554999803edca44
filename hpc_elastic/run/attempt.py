"""One execution of the job: attempt.json, written before the agents start, and result.json, its end."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeGuard

from msgspec import Struct, field
from msgspec.structs import replace

from hpc_elastic.base import codec
from hpc_elastic.base.files import Unreadable
from hpc_elastic.errors import UnreadableFileError
from hpc_elastic.run.paths import RunPaths

WITHOUT_VERDICT = "ended without a verdict: "
"""The end that Slurm reports of an attempt whose supervisor could not write its own begins with this."""
_JOB_ID = re.compile(r"[1-9][0-9]{0,9}(?:[_+][0-9]{1,10})?\Z")


def is_job_id(value: object) -> TypeGuard[str]:
    """Check for a Slurm job's id: ``70``, an array's task ``70_3``, a component of a het job ``70+1``.

    Files that another user may have prepared hold ids, which go to Slurm's commands, where ``--user=root`` would be an
    option.
    """
    return isinstance(value, str) and _JOB_ID.match(value) is not None


class UnreadableAttemptError(UnreadableFileError):
    """attempt.json is missing, torn, or of another version."""


class LocalSupervisor(Struct, frozen=True, kw_only=True):
    """The process that a local run is signalled by."""

    pid: int
    starttime: int
    """Clock ticks since the boot of its host: another process with this pid has another one."""
    run_dir: str
    """The run's own directory: a copy of it names the same process."""


class AttemptInfo(Struct, frozen=True, kw_only=True):
    number: int
    cluster: str
    """``slurm`` or ``local``."""
    nodes: tuple[str, ...]
    """Node names in Slurm's order; the index is the node index everywhere."""
    batch_host: str
    started_ns: int
    """The batch host's wall clock."""
    job_id: str | None = None
    """Slurm's notation: ``70_1`` for an array task."""
    slurm_cluster: str = ""
    slurm_job_ids: tuple[str, ...] = ()
    """SLURM_JOB_ID of this attempt and of those before it, each once, the newest first: a follow-on job has its own."""
    restart_count: int = 0
    requeue_armed: bool = False
    requeue_reason: str = ""
    requeue_way: str = "requeue"
    """``requeue``, or ``chain`` for a follow-on job."""
    kill_wait: float | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    supervisor: LocalSupervisor | None = None
    """Set for a run on one machine."""

    def save(self, path: Path) -> None:
        codec.save(path, self, durable=True)


def load_attempt(path: Path) -> AttemptInfo:
    found = codec.load(path, AttemptInfo)
    if isinstance(found, Unreadable):
        raise UnreadableAttemptError(path=str(path), why=found, errno=found.errno)
    if not (found.job_id is None or is_job_id(found.job_id)):
        raise UnreadableAttemptError(path=str(path), why=f"unreadable: job_id {found.job_id!r} is not a job id")
    return found


class StoredResult(Struct, frozen=True, kw_only=True):
    outcome: str
    reason: str
    exit_code: int
    action: str
    decision: str
    fingerprint: str = ""
    step: int = -1
    idle: int = 0
    """Number of attempts in a row, this one included, that ended by a failure without progress."""
    next_job: str = ""
    """The follow-on job's id, where the next attempt is another job's."""
    notice: str = ""
    """The notice after which the workers were asked to save and end: ``preemption``, ``time limit``, ``requeue``."""

    def save(self, path: Path) -> None:
        codec.save(path, self, durable=True)


def load_result(path: Path) -> StoredResult | None:
    found = codec.load(path, StoredResult)
    if isinstance(found, Unreadable):
        return None
    return found if is_job_id(found.next_job) else replace(found, next_job="")


def load_newest_result(paths: RunPaths) -> StoredResult | None:
    begun = paths.begun_attempts()
    return load_result(begun[-1].result_json) if begun else None
