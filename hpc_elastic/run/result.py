"""result.json: how an attempt ended and what was decided, for whoever waits and for the next attempt."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct, to_builtins

from hpc_elastic.base.files import read_json, write_json
from hpc_elastic.run.attempt import is_job_id
from hpc_elastic.run.paths import RunPaths

VERSION = 1


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
        write_json(path, {"version": VERSION, **to_builtins(self)}, durable=True)


def load_result(path: Path) -> StoredResult | None:
    """The stored end, or None where there is none that can be read."""
    value = read_json(path)
    if isinstance(value, str) or value.get("version") != VERSION:
        return None
    chosen = {key: value[key] for key in StoredResult.__struct_fields__ if key in value}
    if any(type(item) is not (int if key in ("exit_code", "step", "idle") else str) for key, item in chosen.items()):
        return None
    if not is_job_id(chosen.get("next_job")):
        chosen.pop("next_job", None)
    try:
        return StoredResult(**chosen)
    except TypeError:
        return None  # something is missing


def load_newest_result(paths: RunPaths) -> StoredResult | None:
    """How the newest attempt ended; None where it has not ended, or none has begun."""
    begun = paths.begun_attempts()
    return load_result(begun[-1].result_json) if begun else None
