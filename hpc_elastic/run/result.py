"""result.json: how an attempt ended and what was decided, for whoever waits and for the next attempt."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.base import codec
from hpc_elastic.base.files import Unreadable
from hpc_elastic.run.attempt import is_job_id
from hpc_elastic.run.paths import RunPaths


class StoredResult(Struct, frozen=True, kw_only=True):
    """The end of one attempt."""

    outcome: str
    reason: str
    exit_code: int
    action: str
    """``requeue`` or ``end``."""
    decision: str
    """Why."""
    fingerprint: str = ""
    step: int = -1
    idle: int = 0
    """How many attempts in a row, this one included, ended by a failure without progress."""
    next_job: str = ""
    """The follow-on job's id, where the next attempt is another job's."""

    def save(self, path: Path) -> None:
        codec.save(path, self, durable=True)


def load_result(path: Path) -> StoredResult | None:
    """The stored end, or None where there is none that can be read."""
    found = codec.load(path, StoredResult)
    if isinstance(found, Unreadable):
        return None
    return found if is_job_id(found.next_job) else replace(found, next_job="")


def load_newest_result(paths: RunPaths) -> StoredResult | None:
    """How the newest attempt ended; None where it has not ended, or none has begun."""
    begun = paths.begun_attempts()
    return load_result(begun[-1].result_json) if begun else None
