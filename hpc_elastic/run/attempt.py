"""One execution of the job: attempt.json, written by the supervisor before the agents start, read by them and later."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct, field, to_builtins

from hpc_elastic.base.files import read_json, write_json
from hpc_elastic.errors import UnreadableFileError

VERSION = 1
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
        write_json(path, {"version": VERSION, **to_builtins(self)}, durable=True)


def load_attempt(path: Path) -> AttemptInfo:
    """Read attempt.json.

    Raises:
        UnreadableAttemptError: it can't be.
    """
    value = read_json(path)
    if isinstance(value, str):
        raise UnreadableAttemptError(path=str(path), why=value, errno=value.errno)
    if value.get("version") != VERSION:
        raise UnreadableAttemptError(
            path=str(path), why=f"has format version {value.get('version')!r}; this program reads {VERSION}"
        )
    known = set(AttemptInfo.__struct_fields__)
    chosen: dict[str, Any] = {key: item for key, item in value.items() if key in known}
    try:
        if not (chosen.get("job_id") is None or is_job_id(chosen["job_id"])):
            raise ValueError(f"job_id {chosen['job_id']!r} is no job's id")
        chosen["nodes"] = tuple(chosen["nodes"])
        chosen["slurm_job_ids"] = tuple(chosen.get("slurm_job_ids", ()))
        return AttemptInfo(**chosen)
    except (KeyError, TypeError) as error:
        raise UnreadableAttemptError(path=str(path), why=f"unreadable: {error!r}") from None
    except ValueError as error:
        raise UnreadableAttemptError(path=str(path), why=f"unreadable: {error}") from None
