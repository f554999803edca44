"""The log of round records: to create record n + 1 is the compare-and-set, and the number is the fencing token.

A deposed coordinator that still believes itself in office tries to create a number that is already there, loses, reads
what the others did, and steps down. Nothing else is needed to keep two of them apart.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from hpc_elastic.rendezvous.state import RoundRecord, Status, decode_record, members_elsewhere
from hpc_elastic.store.file_store import Store, StoreFullError

KEPT_RECORDS = 32
RESERVE = "reserve"
"""Key of a file that keeps room free for a run's end."""
_RESERVE_BYTES = 256 << 10
_FOLDER = "log"


def record_name(number: int) -> str:
    """A record's name in notifications."""
    return f"{_FOLDER}/{number}"


def record_number(key: str) -> int:
    """The number of a record of that name; 0: it is no record's."""
    folder, _, name = key.rpartition("/")
    return int(name) if folder == _FOLDER and name.isdecimal() and len(name) < 20 else 0


class LogRecord(Struct, frozen=True):
    number: int
    value: Mapping[str, Any]


class RecordLog:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._newest: LogRecord | None = None
        self.went_back = False
        """The last listing had nothing as new as what was seen before: the store was wiped, or a listing is stale."""

    def latest(self, *, hint: int = 0) -> LogRecord | None:
        """The newest visible record: one listing, and one read when there is something new.

        `hint`: the number of a record that another says is there; a newer one is found at the next look.
        """
        known = self._newest.number if self._newest else 0
        if hint > known and (raw := self._store.get(_key(hint))) is not None:
            self._newest = LogRecord(hint, _decode(raw))
            return self._newest
        numbers = self._numbers()
        self.went_back = known > max(numbers, default=0)
        for number in sorted(numbers, reverse=True):
            if number <= known:
                break
            raw = self._store.get(_key(number))
            if raw is None:
                continue  # listed and not readable yet: the one before it still holds for this look
            self._newest = LogRecord(number, _decode(raw))
            break
        return self._newest

    def append(self, number: int, value: Mapping[str, Any]) -> bool:
        """Create record `number`, the successor of the newest one that the caller knows. Returns whether it did."""
        raw = json.dumps({**value, "nonce": os.urandom(8).hex()}, separators=(",", ":"))
        if not self._store.put_if_absent(_key(number), raw):
            self._store.invalidate(_FOLDER)  # so that the next look shows who was first, also where caches hid it
            return False
        if max(self._numbers(), default=number) >= number + KEPT_RECORDS:
            # This process was stopped for so long that its number was free again: compacted away. Fewer newer ones are
            # those of others who have already built on this record.
            return False
        self._newest = LogRecord(number, _decode(raw))
        return True

    def read(self, number: int) -> LogRecord | None:
        raw = self._store.get(_key(number))
        return LogRecord(number, _decode(raw)) if raw is not None else None

    def compact(self, *, keep: int = 0) -> None:
        """Remove all but the newest records, and record `keep`. For the coordinator alone."""
        for number in sorted(self._numbers())[:-KEPT_RECORDS]:
            if number != keep:
                self._store.delete(_key(number))

    def _numbers(self) -> list[int]:
        return [int(name) for name in self._store.list(_FOLDER) if name.isdecimal()]


def _key(number: int) -> str:
    return f"{_FOLDER}/{number:016d}"


def _decode(raw: str) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def reserve_room(store: Store) -> None:
    """Keep room for the run's last record, in random bytes that no filesystem makes smaller."""
    store.put_if_absent(RESERVE, os.urandom(_RESERVE_BYTES // 2).hex())


class RoundLog:
    def __init__(self, store: Store, run_id: str) -> None:
        self._store = store
        self._log = RecordLog(store)
        self._run_id = run_id
        self._newest: RoundRecord | None = None

    @property
    def went_back(self) -> bool:
        return self._log.went_back

    def latest(self, *, hint: int = 0) -> RoundRecord | None:
        """The newest visible record, `hint` as in `RecordLog`; the same object while there is no newer one."""
        found = self._log.latest(hint=hint)
        if found is not None and (self._newest is None or found.number > self._newest.number):
            self._newest = self._decode(found.number, found.value)
        return self._newest

    def append(self, record: RoundRecord) -> bool:
        try:
            is_first = self._log.append(record.number, record.to_json())
        except StoreFullError:
            if record.status is not Status.CLOSED:
                raise
            self._store.delete(RESERVE)  # the last one takes what was kept free (`reserve_room`)
            is_first = self._log.append(record.number, record.to_json())
        if is_first:
            self._newest = record
        return is_first

    def compact(self) -> None:
        """Remove old records, but for the one whose member list still holds. For the coordinator alone."""
        self._log.compact(keep=self._newest.members_at if self._newest is not None else 0)

    def _decode(self, number: int, value: Mapping[str, Any]) -> RoundRecord:
        at = members_elsewhere(value)
        known = self._newest
        if at and (known is None or at != (known.members_at or known.number)):
            there = self._log.read(at)
            if there is None:
                raise OSError(errno.EIO, f"record {at} of the log, which has the members, can't be read yet")
            known = decode_record(there.number, there.value, run_id=self._run_id)
        return decode_record(number, value, run_id=self._run_id, known=known)
