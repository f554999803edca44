"""Numbered immutable records: creating number n + 1 is the compare-and-set, and the number is the fencing token.

A deposed coordinator that still believes itself in office tries to create a number that is already there, loses, reads
what the others did, and steps down. Nothing else is needed to keep two of them apart.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from hpc_elastic.light_dataclasses import dataclass
from hpc_elastic.store.base import Store

KEPT_RECORDS = 32
_FOLDER = "log"
_DIGITS = 16


@dataclass(frozen=True, slots=True)
class LogRecord:
    """One record: its number, from 1, and its JSON object."""

    number: int
    value: Mapping[str, Any]


class RecordLog:
    """The log of one store, as one participant sees it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._newest: LogRecord | None = None
        self.went_back = False
        """Whether the last listing had nothing as new as what was seen before: the store was wiped, or a listing is
        stale."""

    def latest(self, *, told: int = 0) -> LogRecord | None:
        """The newest record that is visible. Costs one listing, and one read when there is something new.

        Args:
            told: The number of a record that somebody says is there: one read where it is true and this process has not
                seen it yet. A newer one is then found at the next look.

        Raises:
            OSError: a passing fault.
        """
        known = self._newest.number if self._newest else 0
        if told > known and (raw := self._store.get(_key(told))) is not None:
            self._newest = LogRecord(told, _decode(raw))
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
        """Create record `number`, the successor of the newest one that the caller knows.

        Returns:
            Whether it was this call that did. False: another record has that number; read `latest`.
        """
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
        """An earlier record, or None where it is not there any more."""
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
    return f"{_FOLDER}/{number:0{_DIGITS}d}"


def _decode(raw: str) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
