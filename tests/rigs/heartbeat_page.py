"""A worker's record in its page, by names."""

from __future__ import annotations

from pathlib import Path

from hpc_elastic.worker_api.records import (
    ASKS,
    FIELDS,
    HAS_NOTICE,
    IS_COUNTED,
    NO_STEP,
    HeartbeatRecord,
    put_record,
    read_record,
)

_UNKNOWN = dict.fromkeys(("saved_step", "first_step"), NO_STEP)


def write_record(
    buffer: bytearray,
    *,
    section: bytes,
    asks_for_notices: bool = False,
    has_notice: bool = False,
    is_counted: bool = False,
    **values: int,
) -> None:
    """As the worker does. What `values` leave out is 0, or no step."""
    flags = asks_for_notices * ASKS | has_notice * HAS_NOTICE | is_counted * IS_COUNTED
    put_record(buffer, *({**_UNKNOWN, **values}.get(name, 0) for name in FIELDS), flags, section)


def said(page: Path) -> HeartbeatRecord:
    """The last record of a worker that has spoken."""
    record = read_record(page.read_bytes())
    assert record is not None
    return record
